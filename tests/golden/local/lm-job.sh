#!/bin/bash
# gpt-books: 1 node(s) x 2 rank(s), site local. Made by slurmddp 0.0.0.
#
# Started as: bash job.sh RUN_FOLDER

# No `set -e`: a failing command must not skip the record of how the job ended.
set -uo pipefail

run=${1:?usage: job.sh RUN_FOLDER}
host=$HOSTNAME
job_id=local-$$

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

terminated() {
  signal=$1
  slurm_state=CANCELLED
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

trap 'terminated TERM' TERM
trap 'terminated INT' INT
trap ended EXIT

# --- where: port, and a rendezvous id that no other job or attempt has
# Above Linux's ephemeral ports; from run and attempt, so that runs side by side differ; probed, since others may listen.
seed=$(printf '%s %s %s' "$job_id" "$run" "$attempt" | cksum | cut -d' ' -f1)
port=$((61000 + seed % 4500))
for ((tries = 0; tries < 20; tries++)); do
  timeout 2 bash -c "exec 3<>/dev/tcp/127.0.0.1/$port" 2>/dev/null || break
  port=$((61000 + (port - 60999) % 4500))
done

export SLURMDDP_RUN=$run
export SLURMDDP_ATTEMPT=$attempt
export SLURMDDP_LOGS=$logs
export SLURMDDP_PORT=$port
export SLURMDDP_RENDEZVOUS_ID="${run##*/}-$job_id-$attempt"

event job_started "\"nodes\": \"$host\""
say "job $job_id, attempt $attempt on $host"
say "logs of the nodes: $logs"

# --- the run: one copy of node.sh on each node, in the background, since bash runs a trap only between commands
bash "$run/node.sh" >>"$logs/$host.log" 2>&1 </dev/null &
child=$!
wait_for_child
