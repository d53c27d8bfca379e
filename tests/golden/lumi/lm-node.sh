#!/bin/bash
# gpt-books: what runs on each node, started by job.sh. It finds out who this node is, sets the ranks' variables
# and becomes torchrun (`exec`: a signal to this process must reach torchrun, not a shell above it).
set -euo pipefail

run=$SLURMDDP_RUN
logs=$SLURMDDP_LOGS
host=$SLURMD_NODENAME # HOSTNAME comes from wherever srun was called

fail() {
  printf 'slurmddp: node %s: %s\n' "$host" "$*" >&2
  exit 1
}

# An inherited bind path would change the job silently; one that a setup line makes is meant.
unset APPTAINER_BINDPATH APPTAINER_BIND SINGULARITY_BINDPATH SINGULARITY_BIND

# --- setup lines of the site and the job: `module` and conda need a shell without -e and -u
set +eu
type module >/dev/null 2>&1 || source /etc/profile
setup=(
  'module purge'
  'module use /appl/local/laifs/modules'
  'module load lumi-aif-singularity-bindings'
  "export TORCH_HOME=/scratch/\$SLURM_JOB_ACCOUNT/\$USER/torch_home"
)
for line in "${setup[@]}"; do
  eval "$line" || fail "setup line failed with exit code $?: $line"
done
set -eu

# --- who this node is. The head is the first node of this step; all addresses are the hosts' own, never localhost.
node_rank=$SLURM_NODEID
mapfile -t nodes < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
head=${nodes[0]}
getent ahostsv4 "$head" >/dev/null || fail "cannot resolve the name of the head node, $head"
# Addresses of this host, one a line: index, interface, family, address/bits
read -r interface address < <(
  ip -o -4 addr show up | awk -v want=hsn 'index($2, want) == 1 {sub("/.*", "", $4); print $2, $4; exit}'
) || fail "has no interface hsn with an IPv4 address; it has: $(ip -o -4 addr show up | awk '{printf "%s ", $2}')"
is_host=$((node_rank == 0))

# --- torchrun, one agent a node
torchrun=(
  python3 -m torch.distributed.run
  --nnodes=2 --nproc-per-node=8 --max-restarts=0
  --rdzv-backend=c10d --rdzv-endpoint="$head:$SLURMDDP_PORT" --rdzv-id="$SLURMDDP_RENDEZVOUS_ID"
  --rdzv-conf="is_host=$is_host,join_timeout=600,read_timeout=600"
  --local-addr="$address"
)
program=(
  -m slurmddp.runtime.train "$run"
)

workdir=$run
scratch=/tmp/slurmddp-"$UID-$SLURMDDP_RENDEZVOUS_ID"
mkdir -p "$scratch/miopen" || fail "cannot make the node's own folder, $scratch"
cd "$workdir" || fail "cannot enter the working folder $workdir"
printf 'slurmddp: node %s is %d of 2, address %s, head %s:%s\n' "$host" "$node_rank" "$address" "$head" "$SLURMDDP_PORT"

# --- the container
export SINGULARITY_NO_EVAL=1 # or a shell in the container evaluates the variables' values
command -v singularity >/dev/null || fail 'there is no singularity on this node (does a module have to be loaded in setup?)'
container=(
  singularity exec --rocm
  --pwd "$workdir"
  --bind "$run:$run:rw"
  --bind "$scratch:$scratch:rw"
  --bind /data/books:/data/books:ro
  /images/torch.sif
)

# --- variables of every rank (singularity passes on what begins with SINGULARITYENV_)
# They come last: a name of the user's may be one of this script's own.

# slurmddp: which run and attempt this is; the file whose appearance asks the ranks to save and end
export SINGULARITYENV_SLURMDDP_RUN="$run"
export SINGULARITYENV_SLURMDDP_ATTEMPT="$SLURMDDP_ATTEMPT"
export SINGULARITYENV_SLURMDDP_NODE="$host"
export SINGULARITYENV_SLURMDDP_STOP_FILE="$run/stop"
export SINGULARITYENV_PYTHONPATH="$run/code"
# the interface that the nodes see each other by
export SINGULARITYENV_GLOO_SOCKET_IFNAME="$interface"
# python: unbuffered logs
export SINGULARITYENV_PYTHONUNBUFFERED=1

# the image's own packages, not those of ~/.local
export SINGULARITYENV_PYTHONNOUSERSITE=1

# torchrun: cores for each rank; a restarted worker must not meet the addresses of the dead ones
export SINGULARITYENV_OMP_NUM_THREADS=7
export SINGULARITYENV_TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# flight recorder: what each rank was doing when a collective hung (both the old and the new names)
export SINGULARITYENV_TORCH_FR_BUFFER_SIZE=2000
export SINGULARITYENV_TORCH_NCCL_TRACE_BUFFER_SIZE=2000
export SINGULARITYENV_TORCH_FR_DUMP_TEMP_FILE="$logs"/flight_recorder/rank_
export SINGULARITYENV_TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$logs"/flight_recorder/rank_
export SINGULARITYENV_TORCH_NCCL_DUMP_ON_TIMEOUT=1
export SINGULARITYENV_TORCH_NCCL_ASYNC_ERROR_HANDLING=3

# MIOpen's caches, on the node's own disk
export SINGULARITYENV_MIOPEN_USER_DB_PATH="$scratch"/miopen
export SINGULARITYENV_MIOPEN_CUSTOM_CACHE_DIR="$scratch"/miopen

# network
export SINGULARITYENV_NCCL_NET_GDR_LEVEL=3
export SINGULARITYENV_CXI_FORK_SAFE=1
export SINGULARITYENV_CXI_FORK_SAFE_HP=1
export SINGULARITYENV_FI_CXI_DISABLE_CQ_HUGETLB=1
export SINGULARITYENV_NCCL_SOCKET_IFNAME=hsn

# network.debug: what practitioners ask for first; slow, not for production
export SINGULARITYENV_NCCL_DEBUG=INFO
export SINGULARITYENV_NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET,GRAPH,TUNING
export SINGULARITYENV_NCCL_DEBUG_FILE="$logs"/nccl.%h.%p.log
export SINGULARITYENV_TORCH_DISTRIBUTED_DEBUG=DETAIL
export SINGULARITYENV_TORCH_CPP_LOG_LEVEL=INFO

exec "${container[@]}" "${torchrun[@]}" "${program[@]}"
