#!/bin/bash
# own: 2 node(s) x 4 rank(s), site narval. Made by slurmddp 0.0.0.
#
# Submitted as: sbatch --output=RUN_FOLDER/logs/job.log job.sh RUN_FOLDER
#SBATCH --job-name=own
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=48
#SBATCH --gpus-per-node=a100:4
#SBATCH --mem=510000M
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR2@120

# No `set -e`: a failing command must not skip the record of how the job ended.
set -uo pipefail

run=${1:?usage: job.sh RUN_FOLDER}
host=${SLURMD_NODENAME:-$HOSTNAME} # sbatch and srun hand on HOSTNAME as it was where they were called
job_id=${SLURM_JOB_ID:?this script runs inside a Slurm job}

# --- this attempt: a requeued job starts again here, and must not write over the logs of the one before
attempt=0
while
  printf -v logs '%s/logs/attempt-%03d' "$run" "$attempt"
  ! mkdir "$logs" 2>/dev/null
do
  [[ -d "$logs" ]] || { echo "job.sh: cannot make the folder $logs" >&2; exit 1; }
  attempt=$((attempt + 1))
done
mkdir -p "$logs/flight_recorder"
rm -f "$run/stop" # an earlier attempt was asked to stop, not this one

say() { printf '%(%F %T)T job.sh: %s\n' -1 "$*"; }

# One line of JSON in events.jsonl. Usage: event NAME '"key": "value", ...' (values hold no quotes by construction)
event() {
  printf '{"time": %s, "event": "%s", "attempt": %d, "job_id": "%s", "node": "%s", %s}\n' \
    "$(date +%s.%3N)" "$1" "$attempt" "$job_id" "$host" "$2" >>"$run/events.jsonl"
}

# --- traps: how the job ended is written down however it ends
child=
signal=
slurm_state=
slurm_reason=

stop_in_time() {
  say "the time limit is near: asking the ranks to save and end (stop file)"
  printf 'time limit\n' >"$run/stop"
}

terminated() {
  signal=$1
  # scancel and the time limit send the same signal; only Slurm knows which of them it was.
  local report
  report=$(timeout 3 scontrol show job "$SLURM_JOB_ID" -o 2>/dev/null)
  [[ ! "$report" =~ JobState=([A-Z_]+) ]] || slurm_state=${BASH_REMATCH[1]}
  [[ ! "$report" =~ Reason=([A-Za-z_]+) ]] || slurm_reason=${BASH_REMATCH[1]}
  say "SIG$signal (${slurm_state:-state unknown} $slurm_reason)"
  printf 'SIG%s\n' "$signal" >"$run/stop"
  [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null
}

ended() {
  local code=$?
  event job_ended "\"exit_code\": $code, \"signal\": \"$signal\", \"slurm_state\": \"$slurm_state\", \"slurm_reason\": \"$slurm_reason\""
  say "attempt $attempt ended with exit code $code"
}

# `wait` returns early (above 128) when a trap ran; the child's own code comes once it is gone.
wait_for_child() {
  local code
  while
    wait "$child"
    code=$?
    kill -0 "$child" 2>/dev/null
  do :; done
  return "$code"
}

trap stop_in_time USR2
trap 'terminated TERM' TERM
trap 'terminated INT' INT
trap ended EXIT

# --- where: nodes, port, and a rendezvous id that no other job or attempt has
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${#nodes[@]} < 2)); then
  say "the allocation has ${#nodes[@]} node(s), the run needs 2"
  exit 1
fi

# Above Linux's ephemeral ports; from run and attempt, so that runs side by side differ; probed, since others may listen.
seed=$(printf '%s %s %s' "$job_id" "$run" "$attempt" | cksum | cut -d' ' -f1)
port=$((61000 + seed % 4500))
for ((tries = 0; tries < 20; tries++)); do
  timeout 2 bash -c "exec 3<>/dev/tcp/${nodes[0]}/$port" 2>/dev/null || break
  port=$((61000 + (port - 60999) % 4500))
done

export SLURMDDP_RUN=$run
export SLURMDDP_ATTEMPT=$attempt
export SLURMDDP_LOGS=$logs
export SLURMDDP_PORT=$port
export SLURMDDP_RENDEZVOUS_ID="${run##*/}-$job_id-$attempt"

event job_started "\"nodes\": \"$SLURM_JOB_NODELIST\""
say "job $job_id, attempt $attempt on $SLURM_JOB_NODELIST"
say "logs of the nodes: $logs"

# --- the run: one copy of node.sh on each node, in the background, since bash runs a trap only between commands
srun \
  --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=48 --cpu-bind=none \
  --kill-on-bad-exit=1 --export=ALL --input=none \
  --output="$logs/%N.log" --open-mode=append \
  bash "$run/node.sh" &
child=$!
wait_for_child
