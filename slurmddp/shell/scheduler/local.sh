# shellcheck shell=bash
# --- one machine without Slurm; slurm.sh has the same functions
host=$HOSTNAME
job_id=local-$$
job_nodes=$host
head_address=127.0.0.1
preempted_at=

ask_slurm() { :; }

# Nobody but the user sends this script a signal.
find_reason() {
  slurm_state=CANCELLED
  ending=cancelled
}

withdraw() { :; } # there is no queue

allocated_nodes() { printf '%s\n' "$host"; }

# Usage: on_nodes LOG COMMAND...; in the background, since bash runs a trap only between commands
on_nodes() {
  local log=$1
  shift
  export SLURMDDP_NODES=1
  "${within[@]}" "$@" >>"${log//%N/$host}" 2>&1 </dev/null &
  child=$!
  [[ -z "$ending" ]] || kill -TERM "$child" 2>/dev/null # the signal came before there was a child
  wait_for_child
}
