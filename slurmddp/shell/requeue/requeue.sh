# shellcheck shell=bash
# --- requeue the job with `scontrol requeue`: the run continues in a new attempt, without the nodes that are bad
# Slurm holds a requeued job back for two minutes. Its owner may end that, but not before the job's last process has
# ended: so a process does it that has left the job. (Where cgroups track processes, it is ended with the others, and the
# next command on the login node does it.) Nodes that are not to be used are kept out of the next start in the same way;
# where that leaves too few, they are not.
release_hold() {
  (
    set -- "$slurm_job" "${SLURM_RESTART_COUNT:-0}" "${excluded[*]}" "$run/events.jsonl" "$attempt" "$host"
    for name in `compgen -e`; do # remove the job's variables, except those for reaching Slurm; a token must not be a command's argument
      case $name in
        PATH | HOME | SLURM_CONF | SLURM_CONF_SERVER | SLURM_JWT) ;;
        *) unset "$name" 2>/dev/null ;;
      esac
    done
    setsid bash -s -- "$@" >/dev/null 2>&1 <<'END' &
job=$1 restarts=$2 excluded=${3// /,} events=$4 attempt=$5 host=$6
trap '' TERM INT HUP
told= held=0
for ((seconds = 0; seconds < 180; seconds++)); do
  sleep 1
  report=`timeout 5 scontrol show job "$job" -o`
  [[ ! "$report" =~ JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT) ]] || exit
  [[ "$report" =~ \ Restarts=([0-9]+) ]] && ((BASH_REMATCH[1] > restarts)) || continue
  case "$report" in
    *JobState=PENDING*Reason=BeginTime*)
      # Within the second in which it ended the last one, a node refuses a job's new start, and the job fails for it.
      ((++held > 2)) || continue
      scontrol update JobId="$job" StartTime=now || continue
      [[ -n "$told" ]] || printf '{"time": %s, "event": "hold_released", "attempt": %d, "job_id": "%s", "node": "%s"}\n' \
        "`date +%s.%3N`" "$attempt" "$job" "$host" >>"$events"
      told=yes
      [[ -n "$excluded" ]] || exit
      [[ ! "$report" =~ \ ExcNodeList=([A-Za-z0-9][^ ]*) ]] || excluded+=",${BASH_REMATCH[1]}"
      scontrol update JobId="$job" ExcNodeList="$excluded" || exit
      ;;
    *JobState=PENDING*Reason=BadConstraints* | *JobState=PENDING*Reason=ReqNodeNotAvail*)
      scontrol update JobId="$job" ExcNodeList= && exit
      ;;
    *JobState=RUNNING*) exit ;;
  esac
done
END
  )
}

# True where Slurm has put the job back since this script began
in_the_queue() {
  [[ "`timeout 5 scontrol show job "$slurm_job" -o 2>/dev/null`" =~ \ Restarts=([0-9]+) ]] &&
    ((BASH_REMATCH[1] > ${SLURM_RESTART_COUNT:-0}))
}

# Usage: requeue REASON. False where Slurm refuses.
requeue() {
  trap '' TERM INT USR2 # Slurm sends SIGTERM to all of the job as soon as it is requeued
  local answer tries
  # To Slurm 22.05, a job that ends within its grace time is over, so it is asked; 24.11 and 26.05 requeue it.
  if [[ "$1" == "node failure" ]] || { [[ "$1" == preemption ]] && ! [[ "`scontrol --version`" =~ \ (1?[0-9]|2[0-2])\. ]] &&
    [[ "`timeout 5 scontrol show partition "$SLURM_JOB_PARTITION" -o`" == *PreemptMode=*REQUEUE* ]]; }; then
    was_requeued "$1" # or will be, when this script ends: asked for as well, it would be requeued twice
    return
  fi
  release_hold
  for ((tries = 1; ; tries++)); do
    # What this script ignores, timeout makes its child heed: scontrol, killed before it has the answer, would look refused.
    answer=`timeout --signal=KILL 10 bash -c "trap '' TERM; exec scontrol requeue $slurm_job" 2>&1` && break
    ! in_the_queue || break # the answer was lost
    say "Slurm refused to requeue the job: $answer"
    [[ "$answer" == *"contact slurm controller"* ]] && ((tries < 8)) || return 1 # it may just be starting again
    sleep 5
  done
  is_requeued "$1" "$job_id"
}

# Somebody else has put the job back
was_requeued() {
  release_hold
  is_requeued "$1" "$job_id"
}
