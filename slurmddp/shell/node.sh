# shellcheck shell=bash
# What every node does before its ranks start. node.sh assigns the values and `facts`, which slurmddp/supervisor/node.py has
# found, and sources this file, which runs the setup lines and sets workdir and devices. After that, node.sh calls
# `prepare`, sets the ranks' variables and calls `run_step`.

read_facts() {
  IFS=$'\x1f' read -r code scratch node_rank head address is_host interface network gloo_interface ranks threads counted <<<"$facts"
}

hand_in() { # NAME=VALUE...: variables for the container
  local pair
  for pair in "$@"; do export "$prefix$pair"; done
}

fail() { # with `user` before the text: what the user has to correct, which would be the same on another node
  local fault=
  [[ "$1" != user ]] || { fault=$1; shift; }
  printf 'slurmddp: node %s: %s\n' "$host" "$*" >&2
  read_facts # a setup line may have used these names
  # for job.sh. What fails beside the ranks says nothing of the attempt
  [[ -n "$attach" ]] || "${starter[@]}" "$code" fail "$preflight$alone" "$fault" "$*" || true
  builtin exit 1
}

# What the container's runtime itself reads, and the devices that a contained container lacks
find_container() {
  local device
  if [[ -n "$prefix" ]]; then # it reads variables of its own
    [[ -z "$cache" ]] || export "${executable^^}_CACHEDIR=$cache/$executable"
    export "${executable^^}_NO_EVAL=1" # or a shell in the container evaluates the variables' values
  fi
  command -v "$executable" >/dev/null || fail "$executable is not installed on this node: if it is in a module, load that in setup"
  [[ -n "$contained" ]] || return 0
  # It has a /dev of its own, without these. Only there: in the host's /dev, --bind would mount them `nodev`, so nobody
  # could open them. Its own /dev/shm may take half of the memory, and --bind does not change it.
  for device in /dev/infiniband /dev/gdrdrv /dev/cxi[0-9]*; do
    [[ ! -e "$device" ]] || devices+=(--bind "$device")
  done
}

check() { # NAME ARGUMENT...: a check in supervisor/node_checks.py, which tells job.sh what it refuses
  "${starter[@]}" "$code" "$1" "$preflight$alone" "${@:2}" && return
  [[ -s "$logs/preflight/$host.failed" ]] || fail "cannot check $1: its log says why"
  exit 1
}

# If Python, torch or accelerate is missing, the ranks cannot start; job.sh decides by these messages
check_python() {
  local inherited=
  [[ "$runtime" != none ]] || inherited=${PYTHONPATH:+:$PYTHONPATH}
  read_facts # a setup line or a variable of the ranks may have used these names
  check python "$runtime" "$python" "${prefix}PYTHONPATH=$own_python_path$inherited" "$run" "${container[@]}"
}

# The preflight's step: it starts slurmddp.runtime.preflight in the same container, in the same way as the ranks
prepare_preflight() {
  local about
  SLURMDDP_COMMAND=("${container[@]}" "$python" -m slurmddp.runtime.preflight "$run")
  SLURMDDP_PREFLIGHT_STDERR=$logs/preflight/$host.stderr
  mkdir -p "$logs/preflight" || fail "cannot write into the run folder ($logs)"
  about=$(check mounts "$image" "${binds[@]}") || exit 1
  [[ -z "$image" ]] || hand_in SLURMDDP_IMAGE="$about"
  hand_in SLURMDDP_LOGS="$logs" SLURMDDP_PORT="$SLURMDDP_PORT" SLURMDDP_HEAD="$head" SLURMDDP_ADDRESS="$address" \
    SLURMDDP_PREFLIGHT_NODES="${SLURMDDP_PREFLIGHT_NODES:-}" SLURMDDP_PREFLIGHT_SECONDS="${SLURMDDP_PREFLIGHT_SECONDS:-}" \
    SLURMDDP_INTERFACE="$interface" SLURMDDP_NETWORK="$network" SLURMDDP_GPUS="$gpus_per_node" \
    SLURMDDP_GPU_VENDOR="$gpu_vendor" SLURMDDP_SCRATCH="$scratch"
}

# environment_from: secrets, from a file of the user's own, for the ranks and not for the preflight
read_secrets() {
  local secrets pair
  secrets=${XDG_CONFIG_HOME:-${HOME:-}/.config}/slurmddp/secrets/${run##*/}/.environment
  [[ -r "$secrets" ]] || fail "cannot read the variables of environment_from, which submit wrote to $secrets"
  while IFS= read -r -d '' pair; do hand_in "$pair"; done <"$secrets"
}

# The step that measures the network: as the ranks start, with their variables
prepare_network() {
  local per_node=1 # where nodes may differ, too
  ((gpus_per_node == 0)) || [[ -n "$counted" ]] || per_node=$ranks
  SLURMDDP_COMMAND=("${container[@]}" "$python" -m slurmddp.runtime.network --run "$run" --node "$host" --nodes "$SLURMDDP_NETWORK_NODES"
    --number "$node_rank" --ranks "$per_node" --head "$head" --port "$SLURMDDP_PORT" --logs "$logs/network"
    --scratch "$scratch" --fabric "$fabric" --min-bandwidth "${min_bandwidth:-0}")
  [[ -z "$allow_socket" ]] || SLURMDDP_COMMAND+=(--allow-socket)
}

# Prepare this step: check Python, read secrets, write the command of preflight or measurement
prepare() {
  if [[ -z "$attach" && (-z "$preflight" || ("$runtime" == none && "${SLURMDDP_STEP:-}" == preflight)) ]]; then check_python; fi
  # run_step reads these, and the ranks' variables are set in between: without a container, in this same shell.
  SLURMDDP_SCRIPT_VALUES=$(declare -p host logs preflight alone runtime prefix own_python_path container python starter facts attach)
  # It chooses the libcuda of what comes behind it
  [[ -z "$compat" ]] || container+=("$python" -m slurmddp.runtime.libcuda "$host" "$attach")
  case ${SLURMDDP_STEP:-} in
    attach | preflight | network) "prepare_$SLURMDDP_STEP" ;;
    *) prepare_ranks ;;
  esac
  unset -v setup binds devices command values starter # arrays, which bash does not export: a variable of the user's may have such a name
}

# slurmddp debug shell and port: a command with the ranks' variables; -m MODULE is run by their Python
prepare_attach() {
  if [[ -n "$environment_from" ]]; then read_secrets; fi
  SLURMDDP_COMMAND=("${command[@]}")
  [[ "${command[0]}" != -m ]] || SLURMDDP_COMMAND=("$python" "${command[@]}")
  [[ ! -t 0 ]] || container=("${container[@]/#--input=none/--pty}") # pyxis's, a step of its own
}

prepare_ranks() {
  if [[ -n "$environment_from" ]]; then read_secrets; fi
  # Apptainer's mount of the image keeps nothing of this environment: the cleanup knows it by its session
  [[ "$runtime" == none ]] ||
    { mkdir -p "$logs/sessions" && read -ra stat </proc/self/stat && printf '%s\n' "${stat[5]}" >>"$logs/sessions/$host"; } || true
  [[ -n "$preflight" || -n "$alone" ]] ||
    : >"$logs/preflight/$host.ready" || true # without this file, a node that fails waits 60 s for nothing
}

# Which GPUs are the job's, past --cleanenv and --containall too
pass_gpus() {
  local name
  for name in CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES; do
    [[ ! -v "$name" ]] || hand_in "$name=${!name}"
  done
}

# launch.mode srun: the variables that torchrun would set, and Slurm's and PMI's own, which --cleanenv would remove
name_rank() {
  local name
  [[ -z "${SLURMDDP_STEP:-}" ]] || return 0
  export SLURM_NTASKS_PER_NODE=$ranks # of this step; the job has one task per node
  for name in "${!SLURM_@}" "${!PMI@}"; do hand_in "$name=${!name}"; done
  hand_in RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" GROUP_RANK="$node_rank" WORLD_SIZE="$SLURM_NTASKS" \
    LOCAL_WORLD_SIZE="$ranks" MASTER_ADDR="$head" MASTER_PORT="$SLURMDDP_PORT"
  hand_in SLURMDDP_CHECKPOINT="${SLURMDDP_CHECKPOINT:-}" # the save that all ranks load, for train.resume_args
  ((SLURMDDP_NODES == 1)) || return 0
  # The ranks meet in a file here, which no other user can open (runtime/torch_private.py). The sweep removes it.
  hand_in SLURMDDP_STORE="$scratch/$SLURMDDP_RENDEZVOUS_ID/store"
  mkdir -p "$scratch/$SLURMDDP_RENDEZVOUS_ID/store" || fail "cannot create the folder in which the ranks meet, in $scratch"
}

# Preflight and measurement run here and exit.
run_step() {
  [[ "${SLURMDDP_STEP:-}" != attach ]] || exec "${container[@]}" "${SLURMDDP_COMMAND[@]}" 1>&3 3>&-
  [[ "${SLURMDDP_STEP:-}" != network ]] || exec "${SLURMDDP_COMMAND[@]}"
  [[ "${SLURMDDP_STEP:-}" == preflight ]] || return 0
  # No exec: if the container or its Python does not start, this shell reports it.
  SLURMDDP_PREFLIGHT_CODE=0
  "${SLURMDDP_COMMAND[@]}" 2>"$SLURMDDP_PREFLIGHT_STDERR" || SLURMDDP_PREFLIGHT_CODE=$?
  eval "$SLURMDDP_SCRIPT_VALUES" # a variable of the user's may have such a name
  cat "$SLURMDDP_PREFLIGHT_STDERR" >&2
  ((SLURMDDP_PREFLIGHT_CODE == 0 || SLURMDDP_PREFLIGHT_CODE == 3)) ||
    { check_python; fail "the preflight exited with code $SLURMDDP_PREFLIGHT_CODE: $(tail -n 1 "$SLURMDDP_PREFLIGHT_STDERR")"; }
  exit "$SLURMDDP_PREFLIGHT_CODE"
}

trap - TERM
attach= # slurmddp debug shell: a command of the user's, beside the ranks. What is said before is not its output.
command=()
if [[ "${SLURMDDP_STEP:-}" == attach ]]; then
  attach=yes
  command=("$@")
  set -- # or scripts that a setup line sources would see it
  exec 3>&1 1>&2
fi
read_facts
((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) || fail "bash $BASH_VERSION is too old: 4.4 or newer is needed"
container=()
devices=()
if [[ "$runtime" == none ]]; then
  unset PYTHONPATH # of the shell that submitted; values set by a setup line are kept on purpose
else
  # Inherited values would change the job silently; values set by a setup line are kept on purpose.
  unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAIN,CONTAINALL,COMPAT}
fi
if ((${#setup[@]} > 0)); then
  finished=
  source "$code/slurmddp/shell/setup.sh"
  read_facts # once more: scripts of modules and conda have variables of these names, too
  [[ -n "$finished" ]] || fail user "setup line failed: it must not call return: $line"
fi
[[ -z "$cache" ]] || mkdir -p "$cache" || fail "cannot create the cache folder, $cache"
[[ -z "$miopen" ]] || mkdir -p "$scratch/miopen"
workdir=${workdir:-$run}
[[ "$workdir" != "$run"/* ]] || mkdir -p "$workdir" || fail "cannot create the working folder $workdir"
cd "$workdir" || fail "cannot enter the working folder $workdir"
[[ -n "$attach" ]] || printf 'slurmddp: node rank %d of %d: host %s, address %s, head %s:%s\n' "$node_rank" "$SLURMDDP_NODES" "$host" "$address" "$head" "$SLURMDDP_PORT"
if [[ "$runtime" != none ]]; then find_container; fi
