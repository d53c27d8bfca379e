# shellcheck shell=bash
# The order of things in a job: job.sh assigns the values (its "values of this job"), sources this file, sets the traps
# and calls `run_job` and `finish`. All files here are the same for every site and job. They are read whole before
# anything starts, so a run folder that is purged later does not stop a running job.

incomplete() { cannot_start "the run's copy of the code is incomplete, $shell: was the file system purged? Submit again, with --resume ${run##*/}"; }

if [[ "$scheduler" == slurm ]]; then
  source "$shell/scheduler/slurm.sh" || incomplete
else
  source "$shell/scheduler/local.sh" || incomplete
fi
source "$shell/messages.sh" || incomplete
source "$shell/attempt.sh" || incomplete
source "$shell/rendezvous_port.sh" || incomplete
source "$shell/signals.sh" || incomplete
source "$shell/watch.sh" || incomplete
source "$shell/cause.sh" || incomplete
source "$shell/nodes.sh" || incomplete
source "$shell/preflight.sh" || incomplete
source "$shell/network.sh" || incomplete
source "$shell/breaker.sh" || incomplete
source "$shell/decide.sh" || incomplete
case $requeue_policy in
  requeue) source "$shell/requeue/requeue.sh" || incomplete ;;
  chain) source "$shell/requeue/chain.sh" || incomplete ;;
  *) source "$shell/requeue/none.sh" || incomplete ;;
esac

# If others can read the run folder (paths.mode), they must still not write there. `setup` may set another umask.
[[ "`stat -c %a -- "$run"`" == *00 ]] || umask go-w

# Remove the stop file of an earlier job. A rename, so that a stop file that `slurmddp cancel` writes now is not lost.
forget_stop() {
  local stop=
  mv "$run/stop" "$run/.stop" 2>/dev/null || return 0
  read -r stop <"$run/.stop"
  [[ "$stop" != "cancelled by the user" ]] || mv -n "$run/.stop" "$run/stop"
  rm -f "$run/.stop"
}

guard= # the process of start_guard

# Attempts, one after the other, until one is the last
run_job() {
  : >"$run/job_began" # saved_nothing compares the times of files with it
  event job_started "\"nodes\": `json "$job_nodes"`, \"cancel_grace\": ${cancel_grace:-null}"
  say "job $job_id on $job_nodes"
  exec {events}<"$run/events.jsonl"
  cat <&"$events" >/dev/null # what has happened before this job
  if [[ -n "$counts_gpus" ]] && ! count_gpus; then
    say "Slurm gave this job no GPUs (JOB_GRES of scontrol show job -d)"
    alert failed failed "Slurm gave this job no GPUs" "not restarted automatically"
    settle_alerts 8
    exit 1
  fi
  case `awk -F '"event": "' 'split($2, name, "\"") && name[1] ~ /^(job_started|requeued)$/ {last = last " " name[1]} END {print last}' "$run/events.jsonl"` in
    " job_started") alert started running "" "" ;;
    *"requeued job_started") ;; # the alert was sent when the job was requeued
    *) alert requeued running "its nodes were lost or preempted" "the job has restarted; `resumes`" ;;
  esac
  [[ -z "$guarded" ]] || start_guard
  run_attempt
  while [[ "$decision" == next && -z "$ending" ]]; do
    open_attempt
    run_attempt
  done
}

# Carry out the decision about the last attempt, and send alerts. Returns the job's exit code.
finish() {
  local rank node _
  export SLURMDDP_ALERT_BUDGET=8 # seconds
  [[ "$decision" != next ]] || decide "$exit_code" # a signal came between two attempts
  read -r rank node _ <<<"$cause"
  about=("$rank" "$node")
  if [[ "$decision" == requeue && -z "$ending" ]] && ! requeue "`cause_text "$cause"`"; then
    decision=failed
  fi
  case "$decision" in
    done) alert finished "done" "" "" ;;
    failed) alert_cause failed failed "$cause" "not restarted automatically" ;;
    stopped | cancelled) [[ -n "$ending" ]] || stopped_for_good "$cause" ;; # else the alert was sent at once
  esac
  [[ "$decision" != failed ]] || ((exit_code > 0)) || exit_code=1
  [[ "$decision" != "done" ]] || exit_code=0
  settle_alerts 8
  return "$exit_code"
}

# Write the last record of the job, however it ended
ended() {
  [[ -z "${expedite:-}" || "$decision" == requeue || "$exit_code" == 0 ]] || never_again ||
    say "Slurm did not take Requeue=0: it holds this job in the queue, or starts it again; scancel $slurm_job"
  event job_ended "\"exit_code\": $exit_code, \"signal\": \"$signal\", \"slurm_state\": \"$slurm_state\", \"slurm_reason\": \"$slurm_reason\", \"decision\": \"$decision\""
  say "exits with code $exit_code; decision: $decision"
  [[ -z "$guard" ]] || kill -TERM "$guard" 2>/dev/null
}
