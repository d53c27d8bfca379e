#!/bin/bash
# Requeues the job if job.sh cannot. job.sh starts it beside the training: on its own node or, for a job that may lose
# nodes, on every node.
# - Something kills job.sh (SIGKILL, as where the node is out of memory): Slurm ends the job, and none of job.sh's traps run.
# - The node of job.sh is lost: Slurm lets a job that may lose nodes live on without it (--no-kill), an allocation that
#   nobody uses.
#
# Usage: guard.sh REQUEUE_POLICY BREAKER ELASTIC, as job.sh assigns them
set -uo pipefail

requeue_policy=$1
breaker=$2
elastic=$3
run=$SLURMDDP_RUN
shell=$run/code/slurmddp/shell
host=$SLURMD_NODENAME
job_id=$SLURM_JOB_ID
slurm_job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
slurm_job=${slurm_job:-$job_id}
attempt=$SLURMDDP_ATTEMPT # the newest that this node has seen
excluded=()
trap 'script_was_killed || exit 0; bring_back; exit 0' TERM
trap 'exit 0' INT

source "$shell/messages.sh" || exit
source "$shell/breaker.sh" || exit
case $requeue_policy in
  requeue) source "$shell/requeue/requeue.sh" || exit ;;
  chain) source "$shell/requeue/chain.sh" || exit ;;
  *) source "$shell/requeue/none.sh" || exit ;;
esac

# The newest attempt that has a log folder, which may be newer than this script
newest_attempt() {
  local newest
  newest=`find "$run/logs" -maxdepth 1 -name 'attempt-*' | sort | tail -n 1`
  attempt=$((10#${newest##*-}))
}

# True where the job ends because something killed job.sh. Slurm sends SIGTERM at every end of a job, and job.sh at its own.
script_was_killed() {
  local report
  trap '' TERM INT
  [[ "`grep -E '"event": "(job_started|job_ended|requeued)"' "$run/events.jsonl" | tail -n 1`" == *job_started* ]] || return 1
  report=`timeout 5 scontrol show job "$slurm_job" -o 2>/dev/null`
  [[ "$report" == *" BatchHost=$host "* ]] || return
  [[ "$report" == *Reason=RaisedSignal:9* ]] || # Slurm 22.05 shows another reason
    [[ "$report" == *Reason=JobLaunchFailure* && "$report" == *" ExitCode=0:9 "* ]]
}

# Do what job.sh would do: record the end and requeue the job. Slurm allows KillWait seconds for it.
bring_back() {
  local why="job.sh was killed by SIGKILL (out of memory?)" decision=requeue
  export SLURMDDP_ALERT_BUDGET=4 # seconds
  newest_attempt
  case `from_marker state` in
    done) decision="done" ;;
    failed | "no progress")
      decision=failed
      ! is_cancelled || decision=cancelled
      ;;
    *)
      if is_cancelled; then
        decision=cancelled
      elif no_progress; then
        decision=failed
        why+="; no progress in $breaker starts"
      fi
      ;;
  esac
  event attempt_ended "\"exit_code\": 137, \"cause\": `json "$why"`, \"rank\": null, \"decision\": \"$decision\""
  about=(- "$host")
  if [[ "$decision" == requeue ]] && ! requeue "$host: $why"; then
    decision=failed
  fi
  [[ "$decision" != failed ]] || alert failed failed "$host: $why" "not restarted automatically; slurmddp submit --resume continues from its newest checkpoint, if it has one" "${about[@]}"
  event job_ended "\"exit_code\": 137, \"signal\": \"KILL\", \"slurm_state\": \"FAILED\", \"slurm_reason\": \"RaisedSignal:9\", \"decision\": \"$decision\""
  settle_alerts 4
}

# True once job.sh's heartbeat has stood still for 20 s of this node's own clock
seen=
since=$SECONDS
silent() {
  local now
  now=`stat -c '%Y %s' "$run/heartbeat" 2>/dev/null`
  if [[ "$now" != "$seen" ]]; then
    seen=$now
    since=$SECONDS
  fi
  ((SECONDS - since > 20))
}

# True if Slurm says that the job still runs, without the node of its batch script. Sets `position`: that of this node
# among the remaining ones. Exits if the job is gone, or if this node is not part of it: Slurm does not tell a node that
# was cut off.
orphaned() {
  local report batch_host node nodes found=
  report=`timeout 10 scontrol show job "$slurm_job" -o 2>&1`
  [[ "$report" != *"Invalid job id"* ]] || exit 0
  [[ "$report" =~ JobState=([A-Z_]+) ]] || return 1 # nobody answers
  [[ "${BASH_REMATCH[1]}" == @(RUNNING|SUSPENDED|COMPLETING) ]] || exit 0
  [[ "$report" == *JobState=RUNNING* && "$report" =~ \ BatchHost=([^ ]+) ]] || return 1
  batch_host=${BASH_REMATCH[1]}
  [[ "$report" =~ \ NodeList=([^ ]+) ]] || return 1
  lines_of nodes scontrol show hostnames "${BASH_REMATCH[1]}"
  position=0
  for node in "${nodes[@]}"; do
    [[ "$node" == "$host" || "$found" == yes ]] || position=$((position + 1))
    [[ "$node" != "$host" ]] || found=yes
  done
  [[ "$found" == yes ]] || exit 0
  [[ " ${nodes[*]} " != *" $batch_host "* ]] || return 1
  excluded=("$batch_host")
}

while :; do
  sleep 5 &
  wait $! # a trap waits for a command in the foreground
  [[ -n "$elastic" ]] || continue
  silent || continue
  orphaned || continue
  # One node is enough: the others wait for it, and act only if it does not.
  ((position == 0)) || { sleep $((10 * position)); orphaned || continue; }
  newest_attempt
  if is_cancelled; then
    event job_ended "\"exit_code\": 137, \"signal\": \"KILL\", \"slurm_state\": \"NODE_FAIL\", \"slurm_reason\": \"\", \"decision\": \"cancelled\""
    scancel "$slurm_job"
    exit 0
  fi
  say "node ${excluded[0]}, which ran job.sh, is lost: requeuing the job"
  event node_excluded "\"excluded\": `json "${excluded[0]}"`, \"reason\": \"Slurm lost the node, which ran job.sh\""
  about=(- "${excluded[0]}")
  if requeue "${excluded[0]}: Slurm lost the node, which ran job.sh"; then
    # Its successor waits for its end, and nothing else ends it.
    [[ "$requeue_policy" != chain ]] || scancel "$slurm_job"
    settle_alerts 8
    exit 0
  fi
  alert failed failed "${excluded[0]}: Slurm lost the node, which ran job.sh" "the job is cancelled: it cannot be requeued" "${about[@]}"
  settle_alerts 8
  scancel "$slurm_job"
done
