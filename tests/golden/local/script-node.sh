#!/bin/bash
# own: what runs on each node, started by job.sh. It finds out who this node is, sets the ranks' variables
# and becomes torchrun (`exec`: a signal to this process must reach torchrun, not a shell above it).
set -euo pipefail

run=$SLURMDDP_RUN
logs=$SLURMDDP_LOGS
host=$HOSTNAME

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

# --- setup lines of the site and the job: `module` and conda need a shell without -e and -u
unset PYTHONPATH # of the shell that submitted; values set by a setup line are kept on purpose
set +eu
type module >/dev/null 2>&1 || source /etc/profile
python_before=$(command -v python3)
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

python=/usr/bin/python3
[[ "$(command -v python3)" == "$python_before" ]] || python=python3 # setup has brought one: activate, conda, a module

# --- who this node is: the only one
node_rank=0
head=127.0.0.1
address=127.0.0.1
is_host=$((node_rank == 0))

# --- torchrun, one agent a node
torchrun=(
  "$python" -m slurmddp.runtime.agent "$run" # torchrun, whose agents sign what they tell each other
  --nnodes="$SLURMDDP_NODES" --nproc-per-node=2 --max-restarts=100
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

# --- Python: where it or torch is missing, the ranks cannot start; job.sh decides by these words
check_python() {
  local said there=0 new torch version path
  if ! said=$(env PYTHONPATH=''"${PYTHONPATH:+:$PYTHONPATH}" "$python" -c '
import importlib.util, sys
found = bool(importlib.util.find_spec("torch"))
print(sys.version_info >= (3, 10), found, "%d.%d" % sys.version_info[:2], sys.executable)' 2>&1); then
    # Is it Python, or does the container itself not start?
    /bin/sh -c "command -v \"\$0\"" "$python" >/dev/null 2>&1 || there=$?
    case $there in
      0) fail "container.python: $python does not work: ${said##*$'\n'}" ;;
      1 | 127) fail "container.python: there is no $python on this node: correct it, or load or activate it in setup" ;;
      *) fail "cannot start $python: ${said##*$'\n'}" ;;
    esac
  fi
  read -r new torch version path <<<"${said##*$'\n'}"
  [[ "$new" != False ]] || fail "container.python: $path is Python $version; the ranks need 3.10 or newer"
  [[ "$torch" != False ]] || fail "no torch in $path: add \`setup: [source .../activate]\`, or conda or module lines"
}
check_python

# --- the step before the ranks' own: the same way into the same container, for slurmddp.runtime.preflight
if [[ "${SLURMDDP_STEP:-}" == preflight ]]; then
  preflight=("$python" -m slurmddp.runtime.preflight "$run")
  complaint=$logs/preflight/$host.stderr
  mkdir -p "$logs/preflight" || fail "cannot write into the run folder ($logs)"
  network=
  if [[ -n "${interface:-}" ]]; then # with its prefix length
    network=$(ip -o -4 addr show dev "$interface" | awk -v own="$address/" 'index($4, own) == 1 {print $4; exit}')
  fi
  export SLURMDDP_LOGS="$logs"
  export SLURMDDP_PORT="$SLURMDDP_PORT"
  export SLURMDDP_PREFLIGHT_NODES="${SLURMDDP_PREFLIGHT_NODES:-}"
  export SLURMDDP_PREFLIGHT_SECONDS="${SLURMDDP_PREFLIGHT_SECONDS:-}"
  export SLURMDDP_HEAD="$head"
  export SLURMDDP_ADDRESS="$address"
  export SLURMDDP_INTERFACE="${interface:-}"
  export SLURMDDP_NETWORK="$network"
  export SLURMDDP_GPUS=0
  export SLURMDDP_GPU_VENDOR=''
  export SLURMDDP_SCRATCH="$scratch"
fi

# --- variables of every rank
# They come last: a name of the user's may be one of this script's own.

# slurmddp: which run and attempt this is; the file whose appearance asks the ranks to save a checkpoint, then exit
export SLURMDDP_RUN="$run"
export SLURMDDP_ATTEMPT="$SLURMDDP_ATTEMPT"
export SLURMDDP_RENDEZVOUS_ID="$SLURMDDP_RENDEZVOUS_ID" # sweep.sh knows by it what is this attempt's
export SLURMDDP_NODE="$host"
export SLURMDDP_STOP_FILE="$run/stop"
# how far the run has come (a script of one's own may write its step there), and how often it may fail no further on
export SLURMDDP_PROGRESS_FILE="$run/progress"
export SLURMDDP_NO_PROGRESS=3
export PYTHONPATH="$run/code":"$run"/code/project"${PYTHONPATH:+:$PYTHONPATH}"
# the interface that the nodes see each other by; one node needs none
export GLOO_SOCKET_IFNAME=lo
# python: unbuffered logs
export PYTHONUNBUFFERED=1

# cores for each rank
export OMP_NUM_THREADS=1

# flight recorder: what each rank was doing when a collective hung
export TORCH_FR_BUFFER_SIZE=2000
export TORCH_FR_DUMP_TEMP_FILE="$logs"/flight_recorder/rank_
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$logs"/flight_recorder/rank_
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3

# compilers' caches, on the node's own disk
export TRITON_CACHE_DIR="$scratch"/triton
export TORCHINDUCTOR_CACHE_DIR="$scratch"/inductor

# the job's own
export WANDB_MODE=offline

if [[ "${SLURMDDP_STEP:-}" == preflight ]]; then
  # No exec: where the container or its Python does not start, this shell is left to say so.
  code=0
  "${preflight[@]}" 2>"$complaint" || code=$?
  cat "$complaint" >&2
  ((code == 0 || code == 3)) || { check_python; fail "the preflight ended with exit code $code: $(tail -n 1 "$complaint")"; }
  exit "$code"
fi
exec "${torchrun[@]}" "${program[@]}"
