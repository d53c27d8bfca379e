# shellcheck shell=bash
# --- what job.sh checks every 2 s, while anything runs on the nodes
starts=0       # of the ranks, in this job
noted=         # what the ranks of the newest start said of their end: RANK NODE TEXT
noted_cascade= # whether that is only a consequence of another rank's failure
recovering=    # why the ranks had to start again; empty once they train
slow_for=300   # seconds before an alert names a straggler: most recover
warned_alone=  # whether an alert of this job has said that its ranks do not work together
longest_save=0
longest_start=0 # seconds from the launch of an attempt, or from a failure in it, to the ranks' start

new_attempt() {
  noted=
  noted_cascade=
  marker_seen=
  starting_since=$SECONDS # the launch, or the failure
  start_failed=           # whether the ranks of this attempt have failed, and did not start again yet
  agents_waiting=0        # nodes whose agents have stopped their ranks since then
  abandoned=              # why this script has ended the attempt
  uncounted=0             # starts that failed and that the breaker has not counted
  counted=0               # those that it has
  restarts_then=0         # restarts in place when it counted the newest
  look_again=0
  declare -gA slow=() # host -> when it became slow, its rank, and how slow; "told": once is enough; empty: no more
}

look_around() {
  printf -v now "%(%s)T" -1
  printf "%s\n" "$now" >"$run/heartbeat" # guard.sh reads its time
  read_events
  name_stragglers
  expect_restart
  count_starts
  [[ -z "$stop_lead" ]] || watch_clock
  enforce_cancel
  end_leftovers
}

# A marker says that this attempt is over: ranks that do not see it are ended. They may still write their last
# checkpoint, and torchrun takes 30 s until it kills ranks, which a SIGTERM would begin anew. But where the breaker has
# stopped the run, rank 0 has exited before it trained, and ranks of a user's own script wait for it: nothing is to save.
end_leftovers() {
  if [[ -z "$marker_seen" && -e "`marker`" ]]; then
    marker_seen=$SECONDS
    leftovers_bound=45
    [[ "`from_marker state`" != "no progress" ]] || leftovers_bound=15
  elif [[ -n "$marker_seen" ]] && ((SECONDS - marker_seen > leftovers_bound)); then
    say "the attempt is over, but its processes still run: terminating them"
    marker_seen=$SECONDS
    leftovers_bound=45
    kill -TERM "$child" 2>/dev/null
  fi
}

# An own script may not look at the stop file. After a cancel it gets a grace time, then SIGTERM; torchrun kills its ranks
# 30 s later. What is left after that is killed.
cancelled_since=
overdue= # when they got SIGTERM
enforce_cancel() {
  [[ -n "$cancel_grace" ]] && is_cancelled || return 0
  cancelled_since=${cancelled_since:-$SECONDS}
  ((SECONDS - cancelled_since >= cancel_grace)) || return 0
  if [[ -z "$overdue" ]]; then
    overdue=$SECONDS
    say "the ranks did not exit within $cancel_grace s after the cancel: terminating them"
    event ranks_terminated "\"reason\": \"cancelled by the user\", \"waited\": $cancel_grace"
    kill -TERM "$child" 2>/dev/null
  elif ((SECONDS - overdue >= 45)); then
    overdue=$SECONDS
    say "the ranks ignore SIGTERM: killing them"
    kill -KILL "$child" 2>/dev/null
  fi
}

# Stop an attempt that cannot succeed: torchrun itself would wait for minutes. Usage: abandon WHY
abandon() {
  abandoned=${abandoned:-$1}
  say "terminating the attempt: $1"
  kill -TERM "$child" 2>/dev/null
}

# After a failure, the ranks start again, unless their agents do not find each other: if nodes have lost their
# connection, agents wait for minutes. The next attempt begins with a check of the nodes.
expect_restart() {
  local bound=$((2 * longest_start + 5)) # nodes and file systems may have become busier since
  # An own script may save after a SIGTERM: torchrun waits 30 s for each node's ranks before it kills them.
  [[ -z "$own_script" ]] || ((agents_waiting >= ${#chosen[@]})) || bound=$((bound + 30))
  [[ -n "$start_failed" && ! -e "`marker`" ]] && ((starts > 0 && SECONDS - starting_since > bound)) || return 0
  abandon "the ranks did not restart within $bound s"
  starting_since=$SECONDS # again, if it is still there then
}

# Starts that fail before our own program runs, such as one whose code is gone, are not in the breaker's list. torchrun
# makes a folder for each start of a node's ranks: attempt_0, attempt_1, ...
count_starts() {
  local lines=0
  ((SECONDS >= look_again)) || return 0
  look_again=$((SECONDS + 10)) # there may be many nodes
  [[ ! -e "$run/failures" ]] || lines=`grep -c "^$attempt " "$run/failures"`
  while (cd "$logs" && compgen -G "torchrun/*/*/attempt_$((restarts_then + uncounted + 1))" >/dev/null); do
    uncounted=$((uncounted + 1))
  done
  if ((lines != counted)); then
    counted=$lines
    restarts_then=$((restarts_then + uncounted))
    uncounted=0
  elif ((uncounted > 1)) && [[ -z "$abandoned" && ! -e "`marker`" ]]; then # The newest may be counted in a moment.
    abandon "$uncounted starts failed, the last ones before the ranks ran any code"
  fi
}

# The events that ranks wrote since last time. A line may be half written: its other half comes next time.
half_line=
read_events() {
  local line
  while IFS= read -r line <&"$events" || { half_line+=$line; false; }; do
    line=$half_line$line
    half_line=
    case "$line" in
      *'"event": "rank_started"'*)
        starts=$((starts + 1))
        ((SECONDS - starting_since <= longest_start)) || longest_start=$((SECONDS - starting_since))
        start_failed=
        agents_waiting=0
        ((starts == 1)) || recovering=${recovering:-`best_cause "$noted"`}
        slow=()
        noted=
        noted_cascade=
        ;;
      *'"event": "error"'* | *'"event": "hang"'*)
        [[ -n "$start_failed" ]] || starting_since=$SECONDS
        start_failed=yes
        note "$line"
        ;;
      *'"event": "hang_reported"'*) note "$line" ;; # of an own script, which nobody stopped
      *'"event": "rank_exited"'*'"signal": "SIG'*) note "$line" ;;
      *'"event": "rank_exited"'*) # of a start after the noted one, that died before our program: the logs know why
        ((agents_waiting < ${#chosen[@]})) || noted=
        ;;
      *'"event": "hang_over"'*) [[ "$noted" != *" hang: "* ]] || noted= ;;
      *'"event": "ranks_stopped"'*) # by the agent of each node; of ranks that are killed, nobody else tells
        agents_waiting=$((agents_waiting + 1))
        [[ -n "$start_failed" ]] && ((agents_waiting != ${#chosen[@]})) || starting_since=$SECONDS
        start_failed=yes
        ;;
      *'"event": "straggler_'*) note_straggler "$line" ;;
      *'"event": "no_process_group"'*)
        [[ -n "$warned_alone" ]] || warn "$line"
        warned_alone=yes
        ;;
      *'"event": "checkpoint_saved"'*)
        [[ ! "$line" =~ \"seconds\":\ ([0-9]+) ]] || ((BASH_REMATCH[1] <= longest_save)) || longest_save=${BASH_REMATCH[1]}
        ;;
      *'"event": "first_step"'*) [[ -n "$own_script" ]] || has_recovered ;;
      *'"event": "restarted"'*'"how": "went on"'*) has_recovered ;;
      *'"event": "restarted"'*) # from zero; if it is unknown, only a failure is worth a message
        [[ -z "$recovering" && "$line" != *'"how": "from zero"'* ]] || warn "$line" "$recovering"
        recovering=
        ;;
    esac
  done
}

# The first error of a start is the cause, and a lost connection is what others see of it. Usage: note EVENT_LINE
note() {
  local rank=- node=- text=error cascade= then="the ranks restart"
  if [[ "$1" == *'"event": "hang'* ]]; then
    [[ "$1" != *'"event": "hang_reported"'* ]] || then="nothing is stopped; the stacks of the ranks are in the run folder"
    [[ ! "$1" =~ \"ranks\":\ \[([0-9]+) ]] || rank=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"nodes\":\ \[\"([^\"]+) ]] || node=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"waited\":\ ([0-9]+) ]] || text="hang: no progress for ${BASH_REMATCH[1]} s"
    [[ -n "$noted" ]] || alert_cause hang running "$rank $node $text" "$then"
  elif [[ "$1" == *'"event": "rank_exited"'* ]]; then
    [[ "$1" =~ \"signal\":\ \"(SIG[A-Z0-9]+) ]]
    [[ "${BASH_REMATCH[1]}" != SIG@(TERM|INT|ABRT) ]] || return 0 # cleanup, or what the log says more about
    text="killed by ${BASH_REMATCH[1]/%SIGKILL/SIGKILL (out of memory?)}"
    [[ ! "$1" =~ \"rank\":\ ([0-9]+) ]] || rank=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"node\":\ \"([^\"]+) ]] || node=${BASH_REMATCH[1]}
  else
    [[ ! "$1" =~ \"rank\":\ ([0-9]+) ]] || rank=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"node\":\ \"([^\"]+) ]] || node=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"message\":\ \"(([^\"\\]|\\.)*)\" ]] || text=${BASH_REMATCH[1]}
    [[ ! "$1" =~ \"kind\":\ \"([A-Za-z_]+) ]] || text="${BASH_REMATCH[1]}: $text"
    [[ ! "$text" =~ $consequence ]] || cascade=yes # in a later line of the message, too
  fi
  [[ -z "$noted" || -n "$noted_cascade" ]] || return 0
  noted=`unescaped <<<"$rank $node $text" | plain`
  noted_cascade=$cascade
}

has_recovered() {
  [[ -z "$recovering" ]] || alert_cause recovered running "$recovering" "training continues"
  recovering=
}

# Send the text of an event, which its writer made for people, and why it came to that. Usage: warn EVENT_LINE [CAUSE]
warn() {
  local text rank= node= _
  [[ "$1" =~ \"text\":\ \"(([^\"\\]|\\.)*)\" ]] || return 0
  text=`unescaped <<<"${BASH_REMATCH[1]}" | plain`
  if [[ -n "${2:-}" ]]; then
    read -r rank node _ <<<"$2"
    text+="; before that: `cause_text "$2"`"
  fi
  alert warning running "$text" "nothing is stopped" ${rank:+"$rank" "$node"}
}

# Usage: note_straggler EVENT_LINE
note_straggler() {
  local host since=
  [[ "$1" =~ \"host\":\ \"([^\"]+) && "${slow[${BASH_REMATCH[1]}]:-}" != told ]] || return 0
  host=${BASH_REMATCH[1]}
  if [[ "$1" =~ \"slow_rank\":\ ([0-9]+),\ \"part\":\ \"([a-z]+)\",\ \"factor\":\ ([0-9.]+) && "$1" == *straggler_begins* ]]; then
    since="$SECONDS ${BASH_REMATCH[1]} $host straggler: ${BASH_REMATCH[2]} takes ${BASH_REMATCH[3]} times as long as elsewhere"
  fi
  slow[$host]=$since
}

name_stragglers() {
  local host since
  for host in "${!slow[@]}"; do
    since=${slow[$host]%% *}
    [[ -n "$since" && "$since" != told ]] && ((SECONDS - since >= slow_for)) || continue
    alert_cause straggler running "${slow[$host]#* }" "training continues, at the speed of this node"
    slow[$host]=told
  done
}

# Ask the ranks early enough to save once more, however long a save takes by now.
end_time=${SLURM_JOB_END_TIME:-}
watch_clock() {
  local lead=$((2 * longest_save + 30))
  ((lead > stop_lead)) || lead=$stop_lead
  [[ -n "$end_time" && ! -e "$run/stop" ]] && ((end_time - now < lead)) || return 0
  # An operator may have given the job more time.
  [[ ! "`timeout 5 scontrol show job "$slurm_job" -o 2>/dev/null`" =~ \ EndTime=([^ ]+) ]] || end_time=`date -d "${BASH_REMATCH[1]}" +%s`
  ((end_time - now >= lead)) || ask_to_stop "time limit"
}
