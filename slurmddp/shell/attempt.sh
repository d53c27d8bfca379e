# shellcheck shell=bash
# --- an attempt: one start of torchrun on all nodes. It has a number and logs of its own, and nothing is written twice:
# its number is the first one without a folder, so numbers continue after a requeue.
attempt=0
open_attempt() {
  # If others can write to the folder of runs, somebody may have replaced this run folder by another one.
  [[ ! -e "$run" || -O "$run" ]] || { trap - EXIT; echo "job.sh: $run belongs to another user: nothing in it is run" >&2; exit 1; }
  while
    printf -v logs '%s/logs/attempt-%03d' "$run" "$attempt"
    ! mkdir "$logs" 2>/dev/null
  do
    [[ -d "$logs" ]] || { echo "job.sh: cannot create the folder $logs" >&2; exit 1; }
    attempt=$((attempt + 1))
  done
  stat -c %s "$run/logs/job.log" >"$logs/job_log_begin" 2>/dev/null || true # doctor reads what this attempt adds to it
  mkdir -p "$logs/flight_recorder" "$logs/preflight" "$logs/sweep"
  printf -v SLURMDDP_STARTED "%(%s)T" -1
  export SLURMDDP_STARTED
  export SLURMDDP_RUN=$run
  export SLURMDDP_JOB_ID=$job_id
  export SLURMDDP_ATTEMPT=$attempt
  export SLURMDDP_LOGS=$logs
  export SLURMDDP_RENDEZVOUS_ID="${run##*/}-$job_id-$attempt" # two jobs with one id would silently merge
}

# --- what runs on the nodes: one process per node, started all at once, by `on_nodes` of the scheduler's file
child=     # what runs on the nodes now
within=()  # timeout and its arguments, for commands that must not hang
together=1 # 0: if one node fails, the others continue

train() {
  local code tasks=()
  within=()
  [[ -z "${tasks_per_node:-}" ]] || # launch.mode srun; of an option that is given twice, srun takes the last one
    tasks=(--ntasks="$((${#chosen[@]} * tasks_per_node))" --ntasks-per-node="$tasks_per_node" "${rank_options[@]}")
  on_nodes "$logs/%N.log" "${tasks[@]}" bash "$run/node.sh"
  code=$?
  child=
  [[ ! -e "$logs/srun.err" ]] || cat "$logs/srun.err" >&2 # for job.log
  return "$code"
}

# Remove what an attempt has left on its nodes: processes, shared memory, scratch
sweep() {
  local removed
  lines_of chosen without "${excluded[*]}" "${chosen[@]}"
  within=(timeout --kill-after=5 20)
  SLURMDDP_SWEEP=$SLURMDDP_RENDEZVOUS_ID SLURMDDP_SCHEDULER=$scheduler SLURMDDP_NODE_FOLDER=$node_folder \
    on_nodes "$logs/sweep.out" bash "$shell/sweep.sh"
  child=
  removed=`awk '{name = FILENAME; sub(".*/", "", name); printf "%s%s %s", (n++ ? "; " : ""), name, $0}' "$logs"/sweep/* 2>/dev/null | plain`
  event cleaned "\"removed\": `json "$removed"`"
}

# --- one attempt: check the nodes, choose them, train, decide, clean up
exit_code=1
decision=failed
cause="- - "
run_attempt() {
  local launched=
  new_attempt
  list_nodes
  [[ -z "$preflight" ]] || must_end || check_nodes || return
  if ! must_end && ! choose_nodes; then
    decision=requeue
    cause="- - too few usable nodes: ${nodes[*]:-none}"
    return
  fi
  if [[ -n "$measure" ]] && ! must_end; then
    measure_network || { end_attempt; return; }
  fi
  if [[ "$preflight" == only ]] && ! must_end; then
    say "recovery.preflight is only: no ranks are started"
    exit_code=0
    decision="done"
    return
  fi
  if must_end; then
    say "asked to stop before the ranks started"
    exit_code=0
    decide 0
    end_attempt
    return
  fi
  choose_port "${head_address:-${chosen[0]}}"

  event attempt_started "\"nodes\": `json "${chosen[*]}"`"
  say "attempt $attempt on ${chosen[*]}; node logs: $logs"
  starting_since=$SECONDS
  launched=yes
  train
  exit_code=$?
  read_events
  decide "$exit_code"
  end_attempt
  [[ "$decision" != next ]] || recovering=$cause
  [[ -n "$ending" ]] || sweep
}

# The record of how an attempt ended
end_attempt() {
  local rank node text ended=" ended"
  [[ -z "${launched:-}" ]] || ended=": its ranks exited with code $exit_code"
  read -r rank node text <<<"$cause"
  event attempt_ended "\"exit_code\": $exit_code, \"cause\": `json "$text"`, \"node\": `json "${node#-}"`, \"rank\": ${rank/-/null}, \"decision\": \"$decision\"${outside:+, \"ended_by\": `json "$outside"`}${kept:+, \"not_requeued\": `json "$kept"`}"
  say "attempt $attempt$ended${text:+, `cause_text "$cause"`}; decision: $decision"
}
