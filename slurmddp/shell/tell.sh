# shellcheck shell=bash
# --- what is told: lines in job.log, events for programs, alerts for people
say() { printf '%(%F %T)T job.sh: %s\n' -1 "$*"; }

# One line of JSON in events.jsonl. Usage: event NAME '"key": value, ...'; `node` is this one, if no other is named
event() {
  local facts=$2 end=
  [[ "$facts" == *'"node": '* ]] || facts="\"node\": \"$host\", $facts"
  # A line that a full disk has cut, or the end of a rank, must not take this one with it
  [[ -z "$(tail -c 1 "$run/events.jsonl" 2>/dev/null)" ]] || end=$'\n'
  printf '%s{"time": %s, "event": "%s", "attempt": %d, "job_id": "%s", %s}\n' "$end" \
    "$(date +%s.%3N)" "$1" "$attempt" "$job_id" "$facts" >>"$run/events.jsonl"
}

# A text as JSON's. Control characters and broken bytes are gone by then: see `plain`.
json() {
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

# Lines of valid UTF-8 without control characters, each of 400 bytes at most, for any bytes
plain_lines() {
  tr -d '\000-\011\013-\037\177' | cut -b 1-400 |
    if command -v iconv >/dev/null; then iconv -c -f UTF-8 -t UTF-8; else LC_ALL=C tr -d '\200-\377'; fi
}

# The first line of them
plain() { head -n 1 | plain_lines; }

# A message to people, in the background: nothing waits for a server. A run without alert targets has no alert.sh.
# Usage: alert KIND STATE CAUSE NEXT
alerts=()
alert() {
  [[ -e "$run/alert.sh" ]] || return 0
  (
    trap '' TERM INT USR2 # Slurm sends them to all of this script's processes, and this one has to get through
    exec bash "$run/alert.sh" "$@" </dev/null >/dev/null
  ) &
  alerts+=("$!")
}

# Seconds that alerts which are on their way are waited for
settle_alerts() {
  local waited pid
  for ((waited = 0; waited < $1 * 5; waited++)); do
    for pid in "${alerts[@]}"; do
      ! kill -0 "$pid" 2>/dev/null || break
      pid=
    done
    [[ -n "${pid:-}" ]] || return 0
    sleep 0.2
  done
}

# The job is back in the queue: a line, an event, an alert. Usage: is_requeued REASON NEXT_JOB
is_requeued() {
  say "back in the queue, as job $2: $1"
  event requeued "\"how\": \"$requeue_policy\", \"reason\": $(json "$1"), \"next_job\": \"$2\""
  alert requeued requeued "$1" "job $2 waits in the queue, and resumes"
}
