#!/bin/bash
# own: what runs on each node, started by job.sh. It finds out who this node is, sets the ranks' variables
# and becomes torchrun (`exec`: a signal to this process must reach torchrun, not a shell above it).
set -euo pipefail

run=$SLURMDDP_RUN
logs=$SLURMDDP_LOGS
host=$SLURMD_NODENAME # HOSTNAME comes from wherever srun was called

# One line that the head and job.sh find in the run folder, whole or not at all
leave_word() {
  mkdir -p "$logs/preflight" && printf '%s\n' "$*" >"$logs/preflight/.$host.part" &&
    mv "$logs/preflight/.$host.part" "$logs/preflight/$host.failed"
} 2>/dev/null

fail() {
  printf 'slurmddp: node %s: %s\n' "$host" "$*" >&2
  leave_word "${*//$'\n'/ }" || true
  builtin exit 1
}

[[ -d "$run/code/slurmddp/runtime" ]] || fail "the run's copy of the code is gone, $run/code: was the file system purged? Submit again, with --resume ${run##*/}"

# Inherited values would change the job silently; values set by a setup line are kept on purpose.
unset {APPTAINER,SINGULARITY}_{BIND,BINDPATH,MOUNT,CONTAIN,CONTAINALL,COMPAT}

# --- setup lines of the site and the job: `module` and conda need a shell without -e and -u
set +eu
type module >/dev/null 2>&1 || source /etc/profile
setup=(
  'module load tools'
)
# A setup line, or a script that it sources, may call `exit`: without this function node.sh would exit without a message.
# An EXIT trap would also run at a SIGTERM, which is no fault of the setup line.
# A linter sees no call of it, so it is text for eval.
eval 'exit() {
  local code=${1-$?}
  ((BASH_SUBSHELL == 0)) || builtin exit "$code"
  fail "setup line exited with code $code: $line"
}'
for line in "${setup[@]}"; do
  eval "$line" || fail "setup line failed with exit code $?: $line"
done
unset -f exit
set -eu

python=python3

# --- who this node is. The head is the first node of this step; all addresses are the hosts' own, never localhost.
node_rank=$SLURM_NODEID
mapfile -t nodes < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
head=${nodes[0]}
getent ahostsv4 "$head" >/dev/null || fail "cannot resolve the name of the head node, $head"
# The address that the others see: of the interface that leads to the head (on the head itself: to the second node)
peer=$head
((node_rank > 0 || ${#nodes[@]} == 1)) || peer=${nodes[1]}
towards=$(getent ahostsv4 "$peer" | awk 'NR == 1 {print $1}') || fail "cannot resolve $peer"
read -r interface address < <(
  ip -o -4 route get "$towards" | awk '{for (i = 1; i < NF; i++) {if ($i == "dev") dev = $(i + 1); if ($i == "src") src = $(i + 1)}; print dev, src}'
) || fail "has no route to $peer ($towards)"
is_host=$((node_rank == 0))

# --- torchrun, one agent a node
torchrun=(
  "$python" -m slurmddp.runtime.agent "$run" # torchrun, whose agents sign what they tell each other
  --nnodes="$SLURMDDP_NODES" --nproc-per-node=4 --max-restarts=100
  --log-dir="$logs/torchrun/$host" # its error files; they would stay in /tmp
  --rdzv-backend=slurmddp-c10d --rdzv-endpoint="$head:$SLURMDDP_PORT" --rdzv-id="$SLURMDDP_RENDEZVOUS_ID"
  --rdzv-conf="is_host=$is_host,join_timeout=600,read_timeout=600"
  --local-addr="$address"
)
program=(
  -m slurmddp.runtime.begin "$run"/code/project/train.py
  --lr
  3e-4
  --text
  "it's \$HOME"
)

workdir=/home/alice/project
cache="\$SCRATCH/slurmddp/cache"
mkdir -p "$cache" || fail "cannot make the folder for caches, $cache"
# One folder per user and node, which keeps compiled kernels for the next attempt and the next run. Other users can
# guess its name and make it first: only a folder of our own will do.
scratch=/tmp/slurmddp-"$UID"
mkdir -p /tmp || fail "cannot make the folder" /tmp "(paths.node)"
mkdir -m 700 "$scratch" 2>/dev/null || true
[[ -d "$scratch" && ! -L "$scratch" && -O "$scratch" ]] ||
  fail "$scratch is not a folder of yours: another user may have put it there. Set paths.node to a folder of yours"
chmod 700 "$scratch"

cd "$workdir" || fail "cannot enter the working folder $workdir"
printf 'slurmddp: node %s is %d of %d, address %s, head %s:%s\n' "$host" "$node_rank" "$SLURMDDP_NODES" "$address" "$head" "$SLURMDDP_PORT"

# --- the container
export SINGULARITY_CACHEDIR="$cache/singularity"
export SINGULARITY_NO_EVAL=1 # or a shell in the container evaluates the variables' values
command -v singularity >/dev/null || fail 'there is no singularity on this node (does a module have to be loaded in setup?)'
container=(
  singularity exec --nv
  --pwd "$workdir"
  --bind "$run:$run:rw"
  --bind "$cache:$cache:rw"
  --bind "$scratch:$scratch:rw"
  --bind /leonardo:/leonardo:rw
  --bind /leonardo_scratch:/leonardo_scratch:rw
  --bind /leonardo_work:/leonardo_work:rw
  --bind /home/alice/project:/home/alice/project:rw
  /images/torch.sif
)

# --- which libcuda the ranks get: the host's, or the image's own (cuda-compat) where the node's driver is too old for
# the image. The image's entry point would see to it, but `exec` goes past it.
nvidia=${SLURMDDP_NVIDIA:-/proc/driver/nvidia}
driver=
gpu=
if [[ -r "$nvidia/version" ]]; then
  while read -r line; do
    if [[ "$line" =~ Kernel\ Module(\ +for\ +[[:alnum:]_-]+)?\ +([0-9]+(\.[0-9]+)+) ]]; then
      driver=${BASH_REMATCH[2]}
      break
    fi
  done <"$nvidia/version"
fi
for file in "$nvidia"/gpus/*/information; do
  [[ -z "$gpu" && -r "$file" ]] || continue
  while IFS=: read -r key line; do
    [[ "$key" != Model ]] || read -r gpu <<<"$line"
  done <"$file"
done
if [[ -z "$driver" ]] && command -v nvidia-smi >/dev/null; then
  IFS=', ' read -r driver line < <(timeout 60 nvidia-smi --query-gpu=driver_version,name --format=csv,noheader 2>/dev/null) || true
  if [[ "$driver" =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
    gpu=${gpu:-$line}
  else
    driver= # what it says where it fails
  fi
fi
# It runs in the container, before the ranks' command, and becomes that (`exec`). Only there are the image's own
# variables and libraries to be seen. The image's LD_LIBRARY_PATH stays, ours goes in front.
IFS= read -r -d '' choose_libcuda <<'END' || true
older() { # whether version $1 is older than $2; fields count as numbers
  a=$1 b=$2
  while [ -n "$a$b" ]; do
    x=${a%%.*} y=${b%%.*}
    [ "${x:-0}" -eq "${y:-0}" ] || { [ "${x:-0}" -lt "${y:-0}" ]; return; }
    case $a in *.*) a=${a#*.} ;; *) a= ;; esac
    case $b in *.*) b=${b#*.} ;; *) b= ;; esac
  done
  return 1
}
version() { # whether it is one
  case $1 in '' | *[!0-9.]* | .* | *. | *..*) return 1 ;; *.*) ;; *) return 1 ;; esac
}
works() { # whether NVIDIA's own check, which its images bring, finds that the compat libraries run on this GPU
  check=cudaCheck
  ! command -v timeout >/dev/null 2>&1 || check="timeout 60 cudaCheck"
  said=$(LD_LIBRARY_PATH=$compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} $check 2>/dev/null | head -n 1)
  [ "$said" = "CUDA Driver OK" ]
}
without_compat() { # LD_LIBRARY_PATH without the folders of compat libraries: a newer driver gives error 803 with them
  kept='' all=${LD_LIBRARY_PATH-}
  set -f
  IFS=:
  for folder in $all; do
    case $folder in
      */compat | */compat/*)
        if [ -e "$folder/libcuda.so.1" ]; then
          all=
          continue
        fi ;;
    esac
    kept=$kept${kept:+:}$folder
  done
  printf '%s' "${all:-$kept}"
}
decide() { # host, driver, GPU: prints the LD_LIBRARY_PATH that is right here, and says why on descriptor 3
  host=$1 driver=$2 gpu=$3 compat='' bundled='' floor='' path=${LD_LIBRARY_PATH-}
  for folder in "${_CUDA_COMPAT_PATH:-/usr/local/cuda/compat}/lib.real" "${_CUDA_COMPAT_PATH:-/usr/local/cuda/compat}"; do
    if [ -n "$compat" ] || [ ! -e "$folder/libcuda.so.1" ]; then continue; fi
    compat=$folder
    bundled=$(readlink -f "$folder/libcuda.so.1")
    bundled=${bundled##*libcuda.so.}
  done
  version "$bundled" || bundled=${CUDA_DRIVER_VERSION:-}
  version "$bundled" || bundled=
  case ${CUDA_VERSION:-} in # the least driver of each CUDA major: containers/tables/cuda-compat.yaml
    11.*) floor=450.80.02 ;;
    12.*) floor=525.60.13 ;;
    13.*) floor=580 ;;
  esac
  choice="left as the image has them"
  if ! version "$driver"; then
    verdict="the driver is unknown"
  elif [ -n "$bundled" ] && ! older "$driver" "$bundled"; then
    verdict=native choice=off
    path=$(without_compat)
  elif [ -n "$floor" ] && ! older "$driver" "$floor"; then
    verdict="minor-version compatibility (CUDA ${CUDA_VERSION%%.*}.x from driver $floor on)"
    [ -n "$bundled" ] || verdict="$verdict at least"
  elif [ -z "$compat" ]; then
    verdict=unknown
    [ -z "$floor" ] || verdict="impossible: CUDA ${CUDA_VERSION%%.*}.x needs driver $floor or newer"
  else
    case ${floor:+known}:$gpu in
      known:*GeForce* | known:*TITAN*)
        verdict="impossible: forward compatibility is not for $gpu" choice=off ;;
      *)
        if command -v cudaCheck >/dev/null 2>&1; then
          if works; then
            verdict="forward compatibility, by the image's own check" choice=on
          else
            verdict="impossible: the compat libraries do not run here, the image's own check says '$said'" choice=off
          fi
        elif [ -n "$floor" ]; then # without them it fails for sure
          verdict="forward compatibility (the driver is older than $floor), which data-center GPUs have" choice=on
        else
          verdict=unknown
        fi ;;
    esac
    [ "$choice" != on ] || path=$compat${path:+:$path}
  fi
  if [ -n "$compat" ]; then choice="$choice ($compat)"; else choice="none in the image"; fi
  printf 'slurmddp: node %s: NVIDIA driver %s, %s; image: CUDA %s, driver %s; %s; compat libraries %s\n' "$host" \
    "${driver:-?}" "${gpu:-GPU ?}" "${CUDA_VERSION:-?}" "${bundled:-?}" "$verdict" "$choice" >&3
  printf '%s' "$path"
}
{ set -- "$(decide "$1" "$2" "$3")" "$@"; } 3>&1
if [ "$1" != "${LD_LIBRARY_PATH-}" ]; then
  LD_LIBRARY_PATH=$1
  export LD_LIBRARY_PATH
fi
shift 4
exec "$@"
END
container+=(/bin/sh -c "$choose_libcuda" slurmddp-libcuda "$host" "$driver" "$gpu")

# --- Python: where it or torch is missing, the ranks cannot start; job.sh decides by these words
check_python() {
  local said there=0 new torch version path
  if ! said=$(env SINGULARITYENV_PYTHONPATH='' "${container[@]}" "$python" -c '
import importlib.util, sys
found = bool(importlib.util.find_spec("torch"))
print(sys.version_info >= (3, 10), found, "%d.%d" % sys.version_info[:2], sys.executable)' 2>&1); then
    # Is it Python, or does the container itself not start?
    "${container[@]}" /bin/sh -c "command -v \"\$0\"" "$python" >/dev/null 2>&1 || there=$?
    case $there in
      0) fail "container.python: $python does not work: ${said##*$'\n'}" ;;
      1 | 127) fail "container.python: there is no $python in the image: correct it" ;;
      *) fail "cannot start $python: ${said##*$'\n'}" ;;
    esac
  fi
  read -r new torch version path <<<"${said##*$'\n'}"
  [[ "$new" != False ]] || fail "container.python: $path is Python $version; the ranks need 3.10 or newer"
  [[ "$torch" != False ]] || fail "no torch in $path: install it in the image, or correct container.python"
}

# --- the step before the ranks' own: the same way into the same container, for slurmddp.runtime.preflight
if [[ "${SLURMDDP_STEP:-}" == preflight ]]; then
  preflight=("${container[@]}" "$python" -m slurmddp.runtime.preflight "$run")
  complaint=$logs/preflight/$host.stderr
  mkdir -p "$logs/preflight" || fail "cannot write into the run folder ($logs)"
  binds=( # their sources: where one is missing, the container does not start, and names no other
    /leonardo
    /leonardo_scratch
    /leonardo_work
    /home/alice/project
  )
  absent=
  patience=10 # seconds, for the first that does not answer
  for bind in "${binds[@]}"; do
    # Do not wait for stat: on a dead mount it cannot be interrupted.
    read -r -t "$patience" there < <(stat -L -c yes -- "$bind" 2>&1) || there="no answer" patience=1
    [[ "$there" == yes ]] || absent+="${absent:+, }$bind (${there##*: })"
  done
  [[ -z "$absent" ]] || fail "cannot bind $absent - mount or make it on this node, or correct container.binds"
  network=
  if [[ -n "${interface:-}" ]]; then # with its prefix length
    network=$(ip -o -4 addr show dev "$interface" | awk -v own="$address/" 'index($4, own) == 1 {print $4; exit}')
  fi
  image=/images/torch.sif # its head holds a number of its own, its tail what lies last
  [[ ! -d "$image" ]] || image=$image/.singularity.d/labels.json
  [[ -r "$image" ]] || fail "cannot read the image $image"
  checksum=$({ head -c 1M "$image"; tail -c 1M "$image"; } | cksum)
  image=$(stat -L -c "%s bytes" "$image")
  export SINGULARITYENV_SLURMDDP_LOGS="$logs"
  export SINGULARITYENV_SLURMDDP_PORT="$SLURMDDP_PORT"
  export SINGULARITYENV_SLURMDDP_PREFLIGHT_NODES="${SLURMDDP_PREFLIGHT_NODES:-}"
  export SINGULARITYENV_SLURMDDP_PREFLIGHT_SECONDS="${SLURMDDP_PREFLIGHT_SECONDS:-}"
  export SINGULARITYENV_SLURMDDP_HEAD="$head"
  export SINGULARITYENV_SLURMDDP_ADDRESS="$address"
  export SINGULARITYENV_SLURMDDP_INTERFACE="${interface:-}"
  export SINGULARITYENV_SLURMDDP_NETWORK="$network"
  export SINGULARITYENV_SLURMDDP_GPUS=4
  export SINGULARITYENV_SLURMDDP_GPU_VENDOR=nvidia
  export SINGULARITYENV_SLURMDDP_IMAGE="$image, checksum ${checksum% *}"
  export SINGULARITYENV_SLURMDDP_SCRATCH="$scratch"
fi

# --- variables of every rank (singularity passes on what begins with SINGULARITYENV_)
# They come last: a name of the user's may be one of this script's own.

# slurmddp: which run and attempt this is; the file whose appearance asks the ranks to save a checkpoint, then exit
export SINGULARITYENV_SLURMDDP_RUN="$run"
export SINGULARITYENV_SLURMDDP_ATTEMPT="$SLURMDDP_ATTEMPT"
export SINGULARITYENV_SLURMDDP_RENDEZVOUS_ID="$SLURMDDP_RENDEZVOUS_ID" # sweep.sh knows by it what is this attempt's
export SINGULARITYENV_SLURMDDP_NODE="$host"
export SINGULARITYENV_SLURMDDP_STOP_FILE="$run/stop"
# how far the run has come (a script of one's own may write its step there), and how often it may fail no further on
export SINGULARITYENV_SLURMDDP_PROGRESS_FILE="$run/progress"
export SINGULARITYENV_SLURMDDP_NO_PROGRESS=3
export SINGULARITYENV_PYTHONPATH="$run/code":"$run"/code/project
# the interface that the nodes see each other by; one node needs none
export SINGULARITYENV_GLOO_SOCKET_IFNAME="$interface"
# which GPUs are the job's, past --cleanenv and --containall too
for name in CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES; do
  [[ ! -v "$name" ]] || export "SINGULARITYENV_$name=${!name}"
done
# python: unbuffered logs
export SINGULARITYENV_PYTHONUNBUFFERED=1

# the image's own packages, not those of ~/.local
export SINGULARITYENV_PYTHONNOUSERSITE=1

# cores for each rank
export SINGULARITYENV_OMP_NUM_THREADS=8

# flight recorder: what each rank was doing when a collective hung (both the old and the new names)
export SINGULARITYENV_TORCH_FR_BUFFER_SIZE=2000
export SINGULARITYENV_TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export SINGULARITYENV_TORCH_FR_DUMP_TEMP_FILE="$logs"/flight_recorder/rank_
export SINGULARITYENV_TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$logs"/flight_recorder/rank_
export SINGULARITYENV_TORCH_NCCL_DUMP_ON_TIMEOUT=1
export SINGULARITYENV_TORCH_NCCL_ASYNC_ERROR_HANDLING=3

# downloads, off the home folder
export SINGULARITYENV_HF_HOME="\$SCRATCH/slurmddp/cache/huggingface"

# compilers' caches, on the node's own disk
export SINGULARITYENV_TRITON_CACHE_DIR="$scratch"/triton
export SINGULARITYENV_TORCHINDUCTOR_CACHE_DIR="$scratch"/inductor

# network
export SINGULARITYENV_NCCL_IB_TIMEOUT=120

# the job's own
export SINGULARITYENV_WANDB_MODE=offline

if [[ "${SLURMDDP_STEP:-}" == preflight ]]; then
  # No exec: where the container or its Python does not start, this shell is left to say so.
  code=0
  "${preflight[@]}" 2>"$complaint" || code=$?
  cat "$complaint" >&2
  ((code == 0 || code == 3)) || { check_python; fail "the preflight ended with exit code $code: $(tail -n 1 "$complaint")"; }
  exit "$code"
fi
# Apptainer's mount of the image keeps nothing of this environment: sweep.sh knows it by its session
{ mkdir -p "$logs/sessions" && read -ra stat </proc/self/stat && printf '%s\n' "${stat[5]}" >>"$logs/sessions/$host"; } || true
exec "${container[@]}" "${torchrun[@]}" "${program[@]}"
