#!/bin/bash
# gpt-books: what runs on each node, started by job.sh. It finds out who this node is, sets the ranks' variables
# and becomes torchrun (`exec`: a signal to this process must reach torchrun, not a shell above it).
set -euo pipefail

run=$SLURMDDP_RUN
logs=$SLURMDDP_LOGS
host=$HOSTNAME

fail() {
  printf 'slurmddp: node %s: %s\n' "$host" "$*" >&2
  exit 1
}

# --- who this node is: the only one
node_rank=0
head=127.0.0.1
address=127.0.0.1
is_host=$((node_rank == 0))

# --- torchrun, one agent a node
torchrun=(
  /usr/bin/python3 -m torch.distributed.run
  --nnodes=1 --nproc-per-node=2 --max-restarts=0
  --rdzv-backend=c10d --rdzv-endpoint="$head:$SLURMDDP_PORT" --rdzv-id="$SLURMDDP_RENDEZVOUS_ID"
  --rdzv-conf="is_host=$is_host,join_timeout=600,read_timeout=600"
  --local-addr="$address"
)
program=(
  -m slurmddp.runtime.train "$run"
)

workdir=$run
cd "$workdir" || fail "cannot enter the working folder $workdir"
printf 'slurmddp: node %s is %d of 1, address %s, head %s:%s\n' "$host" "$node_rank" "$address" "$head" "$SLURMDDP_PORT"

# --- variables of every rank
# They come last: a name of the user's may be one of this script's own.

# slurmddp: which run and attempt this is; the file whose appearance asks the ranks to save and end
export SLURMDDP_RUN="$run"
export SLURMDDP_ATTEMPT="$SLURMDDP_ATTEMPT"
export SLURMDDP_NODE="$host"
export SLURMDDP_STOP_FILE="$run/stop"
export PYTHONPATH="$run/code"
# python: unbuffered logs
export PYTHONUNBUFFERED=1

# torchrun: cores for each rank; a restarted worker must not meet the addresses of the dead ones
export OMP_NUM_THREADS=1
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# flight recorder: what each rank was doing when a collective hung
export TORCH_FR_BUFFER_SIZE=2000
export TORCH_FR_DUMP_TEMP_FILE="$logs"/flight_recorder/rank_
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$logs"/flight_recorder/rank_
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3

# network.debug: what practitioners ask for first; slow, not for production
export NCCL_DEBUG=INFO
export NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING
export NCCL_DEBUG_FILE="$logs"/nccl.%h.%p.log
export TORCH_DISTRIBUTED_DEBUG=DETAIL
export TORCH_CPP_LOG_LEVEL=INFO

exec "${torchrun[@]}" "${program[@]}"
