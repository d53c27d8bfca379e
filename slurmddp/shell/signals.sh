# shellcheck shell=bash
# --- signals: why the job ends, and the record of it, which is written in any case
ending=       # why the job is ended from outside: cancelled, time limit, preemption, node failure, requeued
back=         # whether the job starts again after that
signal=
slurm_state=
slurm_reason=
asked="ranks save a checkpoint, then exit"
[[ -z "$own_script" ]] || asked="the script is asked to save and exit"

# The ranks see the file, save and exit. The first reason stays: -C keeps one that a cancel writes in this moment.
# Usage: ask_to_stop REASON
ask_to_stop() {
  [[ ! -e "$run/stop" ]] || return 0
  say "$asked (stop file): $1"
  (set -C && printf '%s\n' "$1" >"$run/stop")
  # Of a job that will end for good, because nothing was saved, the alert at its end tells.
  [[ "$1" == SIG* ]] || { [[ -n "$must_save" ]] && saved_nothing; } || alert stopping stopping "$1" "$asked"
}

# True if nothing may start on the nodes any more
must_end() { [[ -n "$ending" || -e "$run/stop" ]]; }

# Slurm sends USR2 before the time limit and, on some sites, before a preemption.
warned() {
  ask_slurm
  if [[ -z "$preempted_at" ]]; then ask_to_stop "time limit"; else ask_to_stop preemption; fi
}

# Send the last alert of a job that will not continue. Usage: stopped_for_good CAUSE, as RANK NODE TEXT
stopped_for_good() {
  local next="not restarted automatically"
  [[ -n "$kept" ]] || next+="; slurmddp submit --resume continues from its newest checkpoint, if it has one"
  alert_cause stopping stopped "$1" "$next"
}

terminated() {
  signal=$1
  export SLURMDDP_ALERT_BUDGET=4 # seconds: what Slurm's KillWait leaves, at the least
  find_reason # of the scheduler's file: sets `ending`
  if is_cancelled && [[ "$ending" != cancelled ]]; then
    ending=cancelled
    withdraw # Slurm may have put the job back by itself
  fi
  say "SIG$signal: $ending${slurm_reason:+ (Slurm: $slurm_state, $slurm_reason)}"
  ask_to_stop "SIG$signal"
  [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null
  # Slurm waits only some seconds (KillWait): requeue the job and send the alert at once.
  case "$ending" in
    cancelled) ;;
    requeued) ! was_requeued "Slurm or an operator has requeued the job" || back=yes ;;
    "node failure") ! requeue "$ending" || back=yes ;;
    *) { ! goes_on "$ending" || ! requeue "$ending"; } || back=yes ;;
  esac
  [[ -n "$back" ]] || stopped_for_good "- - $ending (SIG$signal)${kept:+; $kept}"
}

# Wait for the child, and look around meanwhile. Returns the child's exit code. bash runs a trap between two commands
# only, so nothing here takes long.
wait_for_child() {
  local nap
  while kill -0 "$child" 2>/dev/null; do
    look_around
    sleep 2 >/dev/null 2>&1 &
    nap=$!
    wait -n "$child" "$nap"
    kill "$nap" 2>/dev/null
    wait "$nap" 2>/dev/null # without bash's message about it
  done
  wait "$child"
}
