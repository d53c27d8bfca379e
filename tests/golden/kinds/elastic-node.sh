#!/bin/bash
# gpt-books: job.sh starts this script on each node. It sets the variables of the ranks and becomes torchrun (`exec`, so
# that signals reach it). It contains the values of this job; the functions are in RUN_FOLDER/code/slurmddp.zip (shell/node.sh).
set -euo pipefail
run=$SLURMDDP_RUN
logs=$SLURMDDP_LOGS
host=$SLURMD_NODENAME # HOSTNAME is that of the machine that called srun

# --- values of this job; '' means no, none or unknown
alone='' preflight=yes min_bandwidth='' allow_socket='' # is this the job's only node; does a preflight run first; minimum GB/s between nodes; may NCCL use TCP
ranks=4 threads_per_rank=8 gpus_per_node=4 gpu_vendor=nvidia fabric=''
wanted_interface=ib0 exact_interface=yes # '': the one with the route to the head node
runtime=apptainer executable=apptainer prefix=APPTAINERENV_ # prefix: of variables for the container
contained='' compat=yes # does the container have its own /dev, /tmp and home; does the node's driver decide which libcuda is used
image=/images/torch.sif
python=python3 python_of_setup='' own_python_path='' # or python3 of the setup lines
workdir='' # '': the run folder
cache='' # shared by all nodes
node_folder=/tmp miopen='' # on the node's own disk; with a folder for MIOpen
environment_from='' # secrets, from a file outside of the run folder
setup=()
binds=(
  --bind /data/books:/data/books:ro
)

# --- our code goes to the node's own disk, once per node, and finds head, address and other facts; its functions run the setup lines
starter=(env SLURMDDP_NODE="$host" "$BASH" "$run/code/python.sh" /opt/bin/python3) # starts a program of our code, which the cleanup would find
values=(wanted_interface="$wanted_interface" exact_interface="$exact_interface" ranks="$ranks" gpus_per_node="$gpus_per_node" threads_per_rank="$threads_per_rank")
trap 'exit 143' TERM # once the program has finished, which would outlive this script
if ! facts=$("${starter[@]}" "$run/code/slurmddp.zip" node alone="$alone" preflight="$preflight" node_folder="$node_folder" "${values[@]}"); then
  why="the run's copy of the code is gone or incomplete, $run/code, or the node has no Python 3.6: see its log. Submit again with --resume ${run##*/}"
  [[ -s "$logs/preflight/$host.failed" || "${SLURMDDP_STEP:-}" == attach ]] || # else the program has told job.sh why
    { mkdir -p "$logs/preflight" && printf '1\n%s\n' "$why" >"$logs/preflight/$host.failed" && printf 'slurmddp: node %s: %s\n' "$host" "$why" >&2; }
  exit 1
fi
source "${facts%%$'\x1f'*}/slurmddp/shell/node.sh"

# --- the container
container=(
  "${starter[@]}" "$code" container "$scratch/$SLURMDDP_RENDEZVOUS_ID/image" "$image" # stays mounted at SIGTERM
  apptainer exec --nv --pwd "$workdir"
  --bind "$run:$run:rw" --bind "$scratch:$scratch:rw" "${binds[@]}"
  "$image"
)

# --- torchrun, one agent per node, and what it starts on each rank
torchrun=(
  "$python" -m slurmddp.runtime.agent "$run" # torchrun, with agents that sign their messages
  --nnodes="$SLURMDDP_NODES" --nproc-per-node="$ranks" --max-restarts=0
  --log-dir="$logs/torchrun/$host" # error files, which would otherwise stay in /tmp
  --rdzv-backend=slurmddp-static --rdzv-endpoint="$head:$SLURMDDP_PORT" --rdzv-id="$SLURMDDP_RENDEZVOUS_ID"
  --rdzv-conf="rank=$node_rank,timeout=600"
  --local-addr="$address"
)
program=(-m slurmddp.runtime.train "$run")

prepare # check Python, read the user's secrets, prepare the preflight

# --- variables of every rank; they come last, because a user's variable may have the name of one in this script
# slurmddp: which run and attempt this is; the stop file, which asks the ranks to save a checkpoint, then exit
export APPTAINERENV_SLURMDDP_RUN="$run"
export APPTAINERENV_SLURMDDP_ATTEMPT="$SLURMDDP_ATTEMPT"
export APPTAINERENV_SLURMDDP_RENDEZVOUS_ID="$SLURMDDP_RENDEZVOUS_ID" # the cleanup finds the processes of this attempt by it
export APPTAINERENV_SLURMDDP_NODE="$host"
export APPTAINERENV_SLURMDDP_STOP_FILE="$run/stop"
# the progress file (your own script may write its step there), and after how many failures without progress the run stops
export APPTAINERENV_SLURMDDP_PROGRESS_FILE="$run/progress"
export APPTAINERENV_SLURMDDP_NO_PROGRESS=3
export APPTAINERENV_PYTHONPATH="$code"
export APPTAINERENV_GLOO_SOCKET_IFNAME="$gloo_interface" # the interface between the nodes; a single node needs none
pass_gpus # the GPUs of this job
export APPTAINERENV_PYTHONUNBUFFERED=1 # python: unbuffered logs
export APPTAINERENV_PYTHONNOUSERSITE=1 # the image's own packages, not those of ~/.local
export APPTAINERENV_OMP_NUM_THREADS=8 # threads per rank
# flight recorder: what each rank was doing when a collective hung (both the old and the new names)
export APPTAINERENV_TORCH_FR_BUFFER_SIZE=2000
export APPTAINERENV_TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export APPTAINERENV_TORCH_FR_DUMP_TEMP_FILE="$logs"/flight_recorder/rank_
export APPTAINERENV_TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$logs"/flight_recorder/rank_
export APPTAINERENV_TORCH_NCCL_DUMP_ON_TIMEOUT=1
export APPTAINERENV_TORCH_NCCL_ASYNC_ERROR_HANDLING=3
# compilers' caches, on the node's own disk
export APPTAINERENV_TRITON_CACHE_DIR="$scratch"/triton
export APPTAINERENV_TORCHINDUCTOR_CACHE_DIR="$scratch"/inductor
export APPTAINERENV_NCCL_SOCKET_IFNAME='=ib0' # network

run_step # the preflight and the measurement of the network run here and exit
exec "${container[@]}" "${torchrun[@]}" "${program[@]}"
