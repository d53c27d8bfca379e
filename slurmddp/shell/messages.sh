# shellcheck shell=bash
# --- messages: lines in job.log, events for programs, alerts for people
# job.sh and guard.sh have traps, so their files write `...`, not $(...) or <(...): bash 5.2 parses the latter at each
# expansion, and a trap that runs in that moment fails ("trap: line 2: unexpected EOF while looking for matching `)'").
# The signal is lost, or bash aborts: one signal in 100, in a loop of such expansions.
say() { printf '%(%F %T)T job.sh: %s\n' -1 "$*"; }

# One line of JSON in events.jsonl. Usage: event NAME '"key": value, ...'; `node` is this one, if no other is named
event() {
  local facts=$2 end=
  [[ "$facts" == *'"node": '* ]] || facts="\"node\": \"$host\", $facts"
  # If a full disk or a killed rank has left half a line, this line must not be joined to it
  [[ -z "`tail -c 1 "$run/events.jsonl" 2>/dev/null`" ]] || end=$'\n'
  printf '%s{"time": %s, "event": "%s", "attempt": %d, "job_id": "%s", %s}\n' "$end" \
    "`date +%s.%3N`" "$1" "$attempt" "$job_id" "$facts" >>"$run/events.jsonl"
}

# The lines of what a command writes, as an array. Usage: lines_of ARRAY COMMAND...
lines_of() {
  local _written
  _written=`"${@:2}"`
  if [[ -n "$_written" ]]; then mapfile -t "$1" <<<"$_written"; else eval "$1=()"; fi
}

# A text as JSON's. Control characters and broken bytes are gone by then: see `plain`.
json() {
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

# The text of a JSON string, with its escapes resolved. Bytes, whatever the locale is: not every awk knows UTF-8.
unescaped() {
  LC_ALL=C awk '
    function code(hex, i, n) {
      for (i = 1; i <= 4; i++) n = 16 * n + index("0123456789abcdef", tolower(substr(hex, i, 1))) - 1
      return n
    }
    function more(n) { return sprintf("%c", 128 + int(n) % 64) }
    function utf8(n) {
      if (n < 32) return ""
      if (n < 128) return sprintf("%c", n)
      if (n < 2048) return sprintf("%c", 192 + int(n / 64)) more(n)
      if (n < 65536) return sprintf("%c", 224 + int(n / 4096)) more(n / 64) more(n)
      return sprintf("%c", 240 + int(n / 262144)) more(n / 4096) more(n / 64) more(n)
    }
    {
      done = ""
      while (at = index($0, "\\")) {
        done = done substr($0, 1, at - 1)
        kind = substr($0, at + 1, 1)
        $0 = substr($0, at + 2)
        if (kind == "u") {
          n = code($0)
          $0 = substr($0, 5)
          if (n >= 55296 && n < 56320 && /^\\u[dD][c-fC-F]/) { # two halves of one character
            n = 65536 + (n - 55296) * 1024 + code(substr($0, 3)) - 56320
            $0 = substr($0, 7)
          }
          done = done utf8(n)
        } else done = done (kind == "n" ? "\n" : kind ~ /[bfrt]/ ? " " : kind)
      }
      print done $0
    }
  '
}

# Lines of valid UTF-8 without control characters, each of 400 bytes at most, for any bytes
plain_lines() {
  tr -d '\000-\011\013-\037\177' | cut -b 1-400 |
    if command -v iconv >/dev/null; then iconv -c -f UTF-8 -t UTF-8; else LC_ALL=C tr -d '\200-\377'; fi
}

# The first line of them
plain() { head -n 1 | plain_lines; }

# A message to people, in the background: nothing waits for a server. A run without alert targets has no alert.sh.
# Usage: alert KIND STATE CAUSE NEXT [RANK NODE]
alerts=()
alert() {
  [[ -e "$run/alert.sh" ]] || return 0
  (
    trap '' TERM INT USR2 # Slurm sends them to all of this script's processes, and this one has to get through
    exec bash "$run/alert.sh" "$@" </dev/null >/dev/null
  ) &
  alerts+=("$!")
}

# Wait for alerts that are being sent. Usage: settle_alerts SECONDS
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

# What the next start of the ranks does is known of our own entrypoint only; guard.sh does not know which one it is.
resumes() {
  if [[ -z "${own_script-unknown}" ]]; then echo "training resumes"; else echo "it resumes if the script loads what it saved"; fi
}

about=(- -) # rank and node that the reason of a requeue is about
# Record that the job was requeued: a line, an event, an alert. Usage: is_requeued REASON NEXT_JOB
is_requeued() {
  say "requeued as job $2: $1"
  event requeued "\"how\": \"$requeue_policy\", \"reason\": `json "$1"`, \"next_job\": \"$2\""
  alert requeued requeued "$1" "job $2 is in the queue; `resumes`" "${about[@]}"
}
