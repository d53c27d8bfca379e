# shellcheck shell=bash
# --- how attempts ended: markers, and the breaker
marker() { printf '%s/markers/attempt-%03d.json' "$run" "$attempt"; }
# The first line of a text of the marker. Usage: from_marker KEY
from_marker() {
  sed -n 's/^ *"'"$1"'": "\(.*\)",\{0,1\}$/\1/p' "`marker`" 2>/dev/null | unescaped | plain
}

# True if the user has cancelled the run: nothing starts it again, whatever ends it
is_cancelled() {
  local stop=
  [[ -e "$run/stop" ]] || return 1
  read -r stop <"$run/stop"
  [[ "$stop" == "cancelled by the user" ]]
}

# Three files in the run folder make the breaker, see slurmddp/runtime/watch/failures.py. True where the last
# `breaker` starts failed and none of them got further than the first.
no_progress() {
  local step=0 failed=${uncounted:-1}
  [[ ! -e "$run/progress" ]] || read -r step _ <"$run/progress"
  [[ "$step" =~ ^[0-9]+$ ]] || step=0
  # One more attempt, on nodes that are checked first: a container that has lost its image fails all starts in place.
  ((failed < breaker)) || failed=$((breaker - 1))
  for ((failed = failed < 1 ? 1 : failed; failed > 0; failed--)); do
    printf '%d %d\n' "$attempt" "$step" >>"$run/failures"
  done
  stuck
}

stuck() {
  tail -n "$breaker" "$run/failures" |
    awk -v breaker="$breaker" 'NR == 1 {first = $2} $2 > first {further = 1} END {exit further || NR < breaker}'
}

# True where nothing is in RUN/checkpoints that is newer than this job; false where that is not known
saved_nothing() {
  local newer
  [[ -e "$run/job_began" ]] || return 1
  [[ -e "$run/checkpoints" ]] || return 0
  newer=`timeout 3 find "$run/checkpoints/" ! -type d -newer "$run/job_began" -print -quit 2>/dev/null` && [[ -z "$newer" ]]
}

# Whether the run may be requeued after its time limit or a preemption; if not, `kept` says why. A start that came no
# further than an earlier one counts for the breaker; only bundled tasks tell a step of the whole run, "STEP STEPS".
# Usage: goes_on REASON
kept=
goes_on() {
  local step= steps= best=
  [[ "$requeue_policy" != none ]] || return 1
  [[ ! -e "$run/progress" ]] || read -r step steps _ <"$run/progress"
  if [[ -n "$must_save" && "$1" == "time limit" ]] && saved_nothing; then
    kept="the script saved nothing in $run/checkpoints since this job began"
    [[ ! "$step" =~ ^[0-9]+$ ]] || kept+=" (the last step seen is $step)"
    kept+=": a requeued job may begin again. Save there and load from there (docs/frameworks.md); if it saves and loads elsewhere, set recovery.requeue: always"
    return 1
  fi
  [[ "$steps" =~ ^[0-9]+$ ]] || return 0
  [[ ! -e "$run/best" ]] || read -r best <"$run/best"
  if [[ -z "$best" ]] || ((step > best)); then
    printf '%d\n' "$step" >"$run/best"
    return 0
  fi
  printf '%d %d\n' "$attempt" "$best" >>"$run/failures"
  stuck || return 0
  kept="$breaker starts in a row came no further than step $best (no_progress): save more often, or ask for more time"
  return 1
}
