#!/bin/bash
# The watchdog job of a run. It begins when the run's job has ended, looks at how, and alerts where no trap could: nothing
# ran on the batch host any more, or the job never began.
#
# Submitted as: sbatch OPTIONS --dependency=afterany:JOB --output=RUN_FOLDER/logs/watchdog.log watchdog.sh RUN_FOLDER JOB OPTIONS
# OPTIONS: what the site's profile asks for, for the next one.
set -uo pipefail

run=${1:?usage: watchdog.sh RUN_FOLDER JOB OPTIONS}
job=${2:?usage: watchdog.sh RUN_FOLDER JOB OPTIONS}
options=("${@:3}")
me=${SLURM_JOB_ID:-}
# What this job was given must not be mistaken for the next job's, or the alert's.
for name in ${!SLURM_@} ${!SBATCH_@}; do
  [[ "$name" == SLURM_CONF* || "$name" == SLURM_JWT ]] || unset "$name"
done

say() { printf '%(%F %T)T watchdog.sh: %s\n' -1 "$*"; }
event() { # Usage: event OUTCOME STATE
  printf '{"time": %s, "event": "watchdog", "job_id": "%s", "watchdog": "%s", "outcome": "%s", "state": "%s"}\n' \
    "$(date +%s.%3N)" "$job" "$me" "$1" "$2" >>"$run/events.jsonl"
}

# --- what Slurm says: the controller while it remembers the job, else accounting, where the site has it
state=
reason=
code=
node=
look() {
  local report field
  report=$(timeout 30 scontrol show job "$job" -o 2>/dev/null)
  [[ ! "$report" =~ JobState=([A-Z_]+) ]] || state=${BASH_REMATCH[1]}
  [[ ! "$report" =~ Reason=([A-Za-z_]+) ]] || reason=${BASH_REMATCH[1]}
  [[ ! "$report" =~ ExitCode=([0-9:]+) ]] || code=${BASH_REMATCH[1]}
  [[ ! "$report" =~ BatchHost=([A-Za-z0-9._-]+) ]] || node=${BASH_REMATCH[1]}
  [[ -z "$state" ]] || return 0
  # One record for each time that it was queued; the newest is the last.
  field=$(timeout 30 sacct --parsable2 --noheader --allocations --duplicates --jobs="$job" --format=State,ExitCode 2>/dev/null | tail -n 1)
  [[ ! "$field" =~ ^([A-Z_]+)[^|]*\|([0-9:]*) ]] || { state=${BASH_REMATCH[1]}; code=${BASH_REMATCH[2]}; }
}

# --- keep waiting: the job was requeued, or another job continues the run
wait_for() { # Usage: wait_for JOB
  local answer
  if answer=$(sbatch --parsable "${options[@]}" --dependency="afterany:$1" --begin=now+30 --open-mode=append \
    --output="${run//%/%%}/logs/watchdog.log" "$run/code/slurmddp/shell/watchdog.sh" "$run" "$1" "${options[@]}"); then
    printf '{"job_id": "%s", "watches": "%s"}\n' "${answer%%;*}" "$1" >"$run/watchdog.json.part" \
      && mv "$run/watchdog.json.part" "$run/watchdog.json"
    say "job $1 continues: watchdog job ${answer%%;*} will check it"
    event waits "$state"
  else
    say "job $1 continues, but the next watchdog job could not be submitted"
    event "not submitted" "$state"
  fi
}

look
# A chained job is another one, which may have begun by now; one that Slurm requeues keeps its number.
newest=$(grep -E '"event": "(job_started|requeued)"' "$run/events.jsonl" 2>/dev/null | tail -n 1)
next_job=
case $newest in
  *'"event": "requeued"'*) [[ ! "$newest" =~ \"next_job\":\ *\"?([0-9_]+) ]] || next_job=${BASH_REMATCH[1]} ;;
  *) [[ ! "$newest" =~ \"job_id\":\ *\"([0-9_]+) ]] || next_job=${BASH_REMATCH[1]} ;;
esac
newest=$(grep -E '"event": "(job_started|job_ended|requeued)"' "$run/events.jsonl" 2>/dev/null | tail -n 1)
attempt=
[[ ! "$newest" =~ \"attempt\":\ *([0-9]+) ]] || attempt=${BASH_REMATCH[1]}
[[ -n "$node" || ! "$newest" =~ \"node\":\ *\"([A-Za-z0-9._-]+)\" ]] || node=${BASH_REMATCH[1]}
say "job $job: ${state:-unknown to Slurm} ${reason:+($reason) }${code:+exit code $code}"

if [[ -n "$next_job" && "$next_job" != "$job" ]]; then
  wait_for "$next_job"
  exit 0
fi
case $state in
  PENDING | RUNNING | CONFIGURING | COMPLETING | SUSPENDED | STOPPED | RESIZING | SIGNALING | STAGE_OUT | REQUEUED | REQUEUE_* | SPECIAL_EXIT | RESV_DEL_HOLD)
    wait_for "$job"
    exit 0
    ;;
esac
case $newest in
  *'"event": "job_ended"'*)
    say "job.sh recorded its exit: no alert needed"
    event "no alert" "$state"
    exit 0
    ;;
  *'"event": "job_started"'*) what="job.sh ended without running its traps" ;;
  *'"event": "requeued"'*) what="the job ended while pending" ;;
  *) what="the job ended before it started" ;;
esac
if [[ "$state" == CANCELLED && "$what" != *traps ]]; then
  say "cancelled while pending: no alert needed"
  event "no alert" "$state"
  exit 0
fi
case $state in
  NODE_FAIL) cause="node ${node:-unknown}, which ran job.sh, was lost" ;;
  TIMEOUT) cause="the time limit killed it${node:+ on node $node}: $what" ;;
  OUT_OF_MEMORY) cause="${node:+node $node: }out of memory: $what" ;;
  *) cause="${node:+node $node: }$what${code:+, exit code $code}${reason:+, reason $reason}" ;;
esac
say "alert: $cause"
event alerted "$state"
export SLURMDDP_JOB_ID=$job SLURMDDP_ALERT_BUDGET=60
[[ -z "$attempt" ]] || export SLURMDDP_ATTEMPT=$attempt
bash "$run/alert.sh" failed "${state:-unknown to Slurm}" "$cause" \
  "not restarted automatically; slurmddp submit --resume ${run##*/} continues it" - "$node"
