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
  tail -n "$breaker" "$run/failures" |
    awk -v breaker="$breaker" 'NR == 1 {first = $2} $2 > first {further = 1} END {exit further || NR < breaker}'
}
