# shellcheck shell=bash
# --- what comes after an attempt
# Sets `decision` (done, stopped, failed, cancelled, requeue, next), `cause`, RANK NODE TEXT, and `outside`: what ended the
# attempt, if nothing in it did. Usage: decide EXIT_CODE
decide() {
  local state stop=
  state=`from_marker state`
  if [[ -e "$run/stop" ]]; then
    read -r stop <"$run/stop"
    stop=${stop:-stop file}
  fi
  cause="- - "
  outside=$ending
  if [[ -n "$ending" ]]; then
    decision=stopped
    [[ "$ending" != cancelled ]] || decision=cancelled
    [[ -z "$back" ]] || decision=requeue
    cause="- - $ending${kept:+; $kept}"
  elif [[ "$state" == "done" ]]; then
    decision="done"
  elif [[ "$stop" == "cancelled by the user" ]]; then
    decision=stopped
    cause="- - $stop"
    outside=cancelled
  elif [[ "$state" == failed || "$state" == "no progress" ]]; then
    decision=failed
    cause=`best_cause "$noted"`
    if [[ "$cause" == *" unknown" || (-z "$noted" && "$cause" =~ $consequence) ]]; then
      cause="- - `from_marker cause`" # which knows more than a log with cascades alone
    elif [[ "$state" == "no progress" ]]; then
      cause+="; `from_marker cause`"
    fi
  elif [[ -n "$stop" ]] || [[ "$state" == stopped && -z "$abandoned" ]]; then
    decide_after_stop "$stop" "$1"
  elif (($1 == 0)) && [[ -z "$abandoned" ]]; then
    decision="done" # the user's own script reports it by its exit code
  else
    decide_after_failure
  fi
}

# A run continues if the cluster was the reason for its stop. Usage: decide_after_stop REASON EXIT_CODE
decide_after_stop() {
  local reason=$1
  decision=stopped
  if [[ -z "$reason" ]]; then # The ranks were sent a signal, and this script was not.
    ask_slurm
    [[ -z "$preempted_at" ]] || reason=preemption
  fi
  if [[ "$reason" == "time limit" || "$reason" == preemption ]]; then
    ! goes_on "$reason" || decision=requeue
    outside=$reason
  fi
  reason=${reason:-`from_marker reason`}
  cause="- - $reason${kept:+; $kept}"
  if [[ -n "$outside" && -n "$noted" && -z "$noted_cascade" && -z "$state" ]] && (($2 != 0)); then
    cause="$noted, when the script had been asked to save and exit ($reason)${kept:+; $kept}"
    outside=
  fi
  if [[ ! -e "$run/stop" ]] && nobody_asked && [[ "$reason" =~ ^SIGTERM\ received\ by\ rank\ ([0-9]+)\ on\ (.+)$ ]]; then
    cause=`forged`
    cause=${cause:-"${BASH_REMATCH[1]} ${BASH_REMATCH[2]} SIGTERM that neither Slurm nor the user sent (earlyoom, or an administrator?)"}
    decision=next
    break_after_failures
  fi
}

# An agent that gets messages of somebody else sends its ranks SIGTERM
forged() {
  awk 'sub(/^slurmddp: node /, "") && sub(/: somebody else /, " somebody else ") {print "-", $0; exit}' "$logs"/*.log 2>/dev/null
}

# True if only some ranks got a SIGTERM. Slurm sends it to all processes of a job or step, agents included.
nobody_asked() {
  local told
  [[ "$scheduler" == local || "$slurm_state" == RUNNING ]] || return 1
  told=`grep -lE 'death signal|got signal: 15' "$logs"/*.log 2>/dev/null | wc -l`
  ((told < ${#chosen[@]}))
}

# Without a preflight: true if node.sh could not start the ranks on any node, for a reason that the user has to
# correct. If it could on others, the nodes that failed are not used again.
nobody_could_start() {
  local node said bad=()
  for node in "${chosen[@]}"; do
    said=`plain 2>/dev/null <"$logs/preflight/$node.failed"`
    [[ "$said" =~ $user_error ]] || continue
    bad+=("$node")
    cause="- $node $said"
  done
  ((${#bad[@]} < ${#chosen[@]})) || return 0
  ((${#bad[@]} == 0)) || exclude "${cause#- * }" "${bad[@]}"
  return 1
}

decide_after_failure() {
  cause=`best_cause "$noted"`
  if [[ -z "$preflight" ]]; then
    decision=failed
    ! nobody_could_start || return
  fi
  [[ -z "$abandoned" ]] || cause+="; $abandoned"
  decision=next
  list_nodes
  if [[ -n "$lost_nodes" ]]; then
    cause="- ${lost_nodes%% *} Slurm lost the node (NodeFail)"
    [[ "$lost_nodes" != *" "* ]] || cause+=", together with ${lost_nodes#* }" # a cause names one node
    return # The run is not at fault.
  fi
  local missed killed
  lines_of missed unreached
  if ((${#missed[@]} > 0)); then
    suspects+=("${missed[@]%% *}")
    cause="- ${missed[0]%% *} Slurm could not start the ranks there: `plain <<<"${missed[0]#* }"`"
  elif [[ -z "$abandoned" ]]; then # The first task that ended badly; the others were ended because of it.
    lines_of killed sed -n '/: task /{s/^srun: error: \([^ :]*\): task [0-9]*: Killed.*/\1/p;q}' "$logs/srun.err" 2>/dev/null
    suspects+=("${killed[@]}")
  fi
  break_after_failures
}

# The breaker's decision about an attempt that failed. One that somebody else has ended is not the run's failure; but
# who can do that again and again must not keep the job in a loop.
strangers=0
break_after_failures() {
  local why step
  why=`forged`
  if [[ -n "$why" ]] && ((++strangers <= 10)); then
    cause="$why (another user, or another job: this start does not count as a failure)"
    return 0
  fi
  no_progress || return 0
  decision=failed
  step=`awk -v breaker="$breaker" '{steps[NR] = $2} END {print steps[NR - breaker + 1] + 1}' "$run/failures"`
  why="$breaker starts in a row crashed before step $step"
  cause+="; $why"
  mkdir -p "$run/markers"
  # A line per key, as the runtime writes it: `from_marker` reads both.
  printf '{\n "state": "no progress",\n "restart": false,\n "attempt": %d,\n "reason": "%s",\n "cause": %s\n}\n' \
    "$attempt" "$why" "`json "$(cause_text "$cause")"`" >"`marker`"
}
