#!/bin/bash
# Sends an alert to each target of the run that asked for this kind. Usage:
# bash RUN_FOLDER/alert.sh KIND STATE CAUSE NEXT [RANK NODE]
# RANK and NODE: where it happened, each - or empty if unknown. They are never read out of CAUSE, which may quote a log.
#
# The same for every site and job. A run folder with alert targets has a copy of it beside job.sh, so that job.sh can
# alert when code/ is gone. What a message says is in RUN_FOLDER/payloads, one file per target: see `compose`.
#
# It takes SLURMDDP_ALERT_BUDGET seconds (30) at most, always exits with 0, and prints nothing on stdout. It writes a
# message to RUN_FOLDER/alerts/spool before it sends it, and deletes it once it has arrived: whatever kills this script,
# the next command on the login node finds the message there. The targets' addresses are secrets: they are in files
# outside of the run folder, and curl reads them from its standard input.
set -uo pipefail
shopt -s extglob
umask 077
export LC_ALL=C # bytes, not characters: a log may hold anything

kind=${1:?usage: alert.sh KIND STATE CAUSE NEXT [RANK NODE]}
budget=${SLURMDDP_ALERT_BUDGET:-30}
[[ "$budget" =~ ^[0-9]{1,5}$ ]] || budget=30
deadline=$((SECONDS + 10#$budget))
run=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run_id=${run##*/}
secrets=${XDG_CONFIG_HOME:-${HOME:-}/.config}/slurmddp/secrets/$run_id
spool=$run/alerts/spool
host=${SLURMD_NODENAME:-${HOSTNAME:-}}
job_id=${SLURMDDP_JOB_ID:-${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}}
job_id=${job_id:-${SLURM_JOB_ID:-}}
now=$(date +%s)

complain() { printf 'slurmddp: alert %s: %s\n' "$kind" "$*" >&2; }

# --- text: from any bytes to UTF-8 without control characters (except line breaks and tabs) and without colors
# By way of UTF-16, which cannot hold what UTF-8 must not: iconv alone lets codes above U+10FFFF through. sed deletes the
# control characters above U+007F and those that change the direction of text or end a line: U+061C, U+200E, U+200F,
# U+2028 to U+202E, U+2066 to U+2069. It comes last: deleting them from valid text makes no new ones.
valid() {
  if command -v iconv >/dev/null; then
    iconv -c -f UTF-8 -t UTF-16LE 2>/dev/null | iconv -c -f UTF-16LE -t UTF-8 2>/dev/null \
      | sed -e $'s/\xc2[\x80-\x9f]//g' -e $'s/\xd8\x9c//g' -e $'s/\xe2\x80[\x8e\x8f\xa8-\xae]//g' -e $'s/\xe2\x81[\xa6-\xa9]//g'
  else
    tr -d '\200-\377'
  fi
}
plain() {
  tr -d '\000' | tr '\r' '\n' \
    | sed -e $'s/\e\\[[0-?]*[ -\\/]*[@-~]//g' -e $'s/\e\\][^\a\e]*\a//g' -e $'s/\e\\][^\a\e]*\e\\\\//g' -e $'s/\e[ -~]//g' \
    | tr -d '\001-\010\013-\037\177' | valid
}

# One line of plain text without secrets. Usage: line TEXT BYTES; sets `text`
line() {
  text=${1:0:16384}
  # Printable ASCII needs no process, and a busy host starts them slowly.
  [[ "$text" != *[!\ -~]* ]] || text=$(printf '%s' "$text" | tr '\n\t' '  ' | plain)
  redact
  head_of "$2"
}

# The first bytes of `text`, without a part of a character. Usage: head_of BYTES
head_of() {
  ((${#text} > $1)) || return 0
  text=${text:0:$1}
  text=${text%[$'\xc0'-$'\xff']*([$'\x80'-$'\xbf'])}...
}

# The last bytes of `text`, from the start of a line, else of a character. Usage: tail_of BYTES
tail_of() {
  ((${#text} > $1)) || return 0
  text=${text:${#text}-$1}
  if [[ "$text" == *$'\n'* ]]; then text=${text#*$'\n'}; else text=${text##+([$'\x80'-$'\xbf'])}; fi
}

# --- the secrets, which no message may contain: each address, its path, and each of its long parts
words=()
address() { # Usage: address NAME; sets `url` and `url_host`, empty if there is none
  url=
  [[ -r "$secrets/$1" ]] && IFS= read -r url <"$secrets/$1"
  [[ "$url" =~ ^https?://[!-~]+$ && "$url" != *[\"\\]* ]] || url=
  url_host=${url#*://}
  url_host=${url_host%%[/?#]*}
  url_host=${url_host##*@} # without the user's name and password
}
learn() {
  local rest path piece
  rest=${url#*://}
  words+=("$url" "$rest")
  path=${rest#*/}
  [[ "$rest" == */* ]] || path=
  ((${#path} < 8)) || words+=("$path")
  piece=${path%%\?*}
  piece=${piece##*/}
  [[ "$path" == *\?* ]] || ((${#piece} < 6)) || words+=("$piece") # the topic of ntfy
  rest=$rest/
  while [[ -n "$rest" ]]; do
    piece=${rest%%[/?&=#@:]*}
    rest=${rest#*[/?&=#@:]}
    ((${#piece} < 16)) || [[ "$piece" == "${url_host%%:*}" ]] || words+=("$piece")
  done
}
redact() {
  local word joined
  for word in "${words[@]}"; do text=${text//"$word"/[secret]}; done
  joined=${text//[$'\n\t ']/} # a log may have broken an address into lines
  for word in "${words[@]}"; do
    [[ "$joined" != *"$word"* ]] || { text="[left out: it holds the address of an alert]"; return; }
  done
}

# --- the facts, which fill the slots of payloads
declare -A fact
gather() { # Usage: gather STATE CAUSE NEXT [RANK NODE]
  local attempt=${SLURMDDP_ATTEMPT:-} logs=${SLURMDDP_LOGS:-} each step='' steps='' progress='no step yet' node=${5:-} rank=${4:-} text
  if [[ -z "$attempt" ]]; then
    for each in "$run"/logs/attempt-*; do [[ ! "$each" =~ -([0-9]{3,9})$ ]] || attempt=$((10#${BASH_REMATCH[1]})); done
  fi
  [[ "$attempt" =~ ^[0-9]{1,9}$ ]] || attempt=0
  attempt=$((10#$attempt))
  [[ -n "$logs" ]] || printf -v logs '%s/logs/attempt-%03d' "$run" "$attempt"
  [[ ! -r "$run/progress" ]] || read -r step steps _ <"$run/progress"
  if [[ "$step" =~ ^[0-9]{1,15}$ ]]; then step=$((10#$step)); else step=; fi
  if [[ -n "$step" && "$steps" =~ ^[0-9]{1,15}$ ]]; then steps=$((10#$steps)); else steps=; fi
  [[ -z "$step" ]] || progress="step $step${steps:+ of $steps}"
  ((${steps:-0} == 0)) || progress+=" ($((100 * step / steps)) %)"
  fact=([kind]=$kind [time]=$now [run]=$run_id [attempt]=$attempt [step]=$step [steps]=$steps [progress]=$progress)
  fact[job]=${job_id:-?}
  fact[job_id]=$job_id
  line "${1:-}" 120
  fact[state]=$text
  line "${2:-}" 600
  fact[cause]=$text
  if [[ "$rank" =~ ^[0-9]{1,9}$ ]]; then rank=$((10#$rank)); else rank=; fi
  [[ "$node" =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$ ]] || node=
  fact+=([node]=$node [rank]=$rank)
  line "${3:-}" 400
  fact[next]=$text
  line "$run" 4096
  fact[folder]=$text
  key=$run_id.$attempt.$kind
  [[ "$kind" != stopping ]] || key+=.${fact[state]} # it is asked to stop, and has stopped
  # These may happen more than once in an attempt; the others are one and the same fact.
  [[ "$kind" != @(hang|straggler|recovered|warning) ]] || key+=.$now
  read -r each _ < <(printf '%s' "$key" | sha256sum)
  fact+=([key]=$key [key_hash]=${each:0:32})
  excerpt "$logs" "$node"
}

# The end of the log that the cause is about, else of the newest one. Usage: excerpt LOGS NODE
excerpt() {
  local each log='' text=''
  if [[ -n "$2" && -s "$1/$2.log" ]]; then
    log=$1/$2.log
  else
    for each in "$1"/*.log; do [[ ! -s "$each" ]] || [[ -n "$log" && ! "$each" -nt "$log" ]] || log=$each; done
    [[ -n "$log" || ! -s "$run/logs/job.log" ]] || log=$run/logs/job.log
  fi
  if [[ -n "$log" ]]; then
    # Cut twice: `redact` must see an address whole, and none is longer than 2000 bytes.
    text=$(tail -c 65536 -- "$log" 2>/dev/null | { if (($(wc -c <"$log") > 65536)); then tail -c +2049; else cat; fi; } \
      | plain | grep -v '^[[:space:]]*$' | tail -n 15 | cut -b 1-4096)
    redact
    text=$(printf '%s' "$text" | cut -b 1-300 | valid)
    tail_of 4500
  fi
  fact[log_tail]=$text
  line "$log" 4096
  fact[log]=$text
}

# --- the message: a payload whose slots are filled
# `text` as the target's `escape` asks. backtick: it stands between backticks; html: as in Slack's markup; json: a string
backslash=\\
escape() {
  [[ "$escape" != *backtick* ]] || text=${text//\`/\'}
  if [[ "$escape" == *html* ]]; then
    text=${text//&/"&amp;"}
    text=${text//</"&lt;"}
    text=${text//>/"&gt;"}
  fi
  if [[ "$escape" == *json* ]]; then
    text=${text//"$backslash"/"$backslash$backslash"}
    text=${text//'"'/"$backslash"'"'}
    text=${text//$'\n'/"$backslash"n}
    text=${text//$'\t'/"$backslash"t}
  fi
}

# Usage: fill TEMPLATE; sets `filled`, subtracts from `room`, and fails if a fact is empty. Slots: @FACT@; @FACT:BYTES@, its
# first bytes; @FACT:rest@, its last bytes, as many as there is room for; @FACT:text@, in quotes, or null; @FACT:number@,
# digits, or null. No fact is filled again: an @ in a cause is only text.
fill() {
  local rest=$1 slot format text status=0
  filled=
  [[ "$escape" == *json* ]] || printf -v rest %b "$rest" # a line break is \n in all templates, as in JSON
  while [[ "$rest" == *@*@* ]]; do
    filled+=${rest%%@*}
    rest=${rest#*@}
    slot=${rest%%@*}
    rest=${rest#*@}
    format=${slot#*:}
    text=${fact[${slot%%:*}]:-}
    [[ ! "$format" =~ ^[0-9]+$ ]] || head_of "$format"
    [[ "$format" != rest ]] || if ((room < 80)); then text=; else tail_of "$room"; fi
    [[ -n "$text" ]] || status=1
    room=$((room - ${#text}))
    escape
    case $format in
      text) text=${text:+\"$text\"} filled+=${text:-null} ;;
      number) filled+=${text:-null} ;;
      *) filled+=$text ;;
    esac
  done
  filled+=$rest
  return "$status"
}

# Reads a payload: each line is a word and its value, options before the parts of the body. Sets the options, `headers`
# and `body`; fails if the target did not ask for this kind. Usage: compose FILE
compose() {
  local item rest asked='' each
  leave=node proxy='' insecure=0 escape='' room=0 headers=() body=''
  while IFS= read -r item || [[ -n "$item" ]]; do
    rest=${item#* }
    case ${item%% *} in
      on) # KIND PRIORITY WHAT HAPPENED
        [[ "$rest" != "$kind "* ]] || read -r asked "fact[priority]" "fact[verb]" <<<"$rest"
        ;;
      leave) leave=$rest ;;       # node, proxy or login: from where messages leave this site
      proxy) proxy=$rest ;;
      insecure) insecure=$rest ;; # 1: the address may be http
      escape) escape=$rest ;;
      bytes) room=$rest ;;        # for all facts together
      header) fill "$rest"; headers+=("$filled") ;;
      part) fill "$rest"; body+=$filled ;;
      optional) fill "$rest" && body+=$filled ;; # left out if a fact in it is empty
      each) # once for each line of the log's end
        while IFS= read -r each; do
          fact[line]=$each
          fill "$rest" && body+=$filled
        done <<<"${fact[log_tail]}"
        ;;
    esac
  done <"$1"
  [[ -n "$asked" ]]
}

# --- sending
event() { # Usage: event TARGET DELIVERED SPOOLED
  printf '{"time": %s, "event": "alert", "attempt": %d, "job_id": "%s", "node": "%s", "kind": "%s", "target": "%s", "delivered": %s, "spooled": %s}\n' \
    "$(date +%s.%3N)" "${fact[attempt]}" "$job_id" "$host" "$kind" "$1" "$2" "$3" >>"$run/events.jsonl"
}

# The message on disk: in the spool, marked as being sent, or, if the disk is full, in a folder of this host.
# Usage: store TARGET; sets `entry`, empty if the message is there already
store() {
  local id=$key.$1 parent
  entry=
  mkdir -p "$spool" 2>/dev/null
  [[ ! -e "$spool/$id" ]] || return 0
  if mkdir "$spool/.$id" 2>/dev/null; then
    entry=$spool/.$id
    write_entry "$1" && return 0
    rm -rf "$entry"
  elif [[ -d "$spool/.$id" ]]; then
    return 0
  fi
  for parent in "${TMPDIR:-/tmp}" /tmp /dev/shm; do
    entry=$(mktemp -d "$parent/slurmddp-alert-XXXXXXXX" 2>/dev/null) || continue
    write_entry "$1" && return 0
    rm -rf "$entry"
  done
  entry=
  complain "cannot store the alert for target $1"
}
write_entry() { # the body first: if there is a head, the message is whole
  printf '%s' "$body" 2>/dev/null >"$entry/body" && {
    printf 'slurmddp-alert 1\ntarget %s\nkey %s\nkind %s\ninsecure %s\nuntil %s\n' \
      "$1" "$key" "$kind" "$insecure" "$((now + 10#$budget + 15))"
    printf 'header %s\n' "${headers[@]}"
  } 2>/dev/null >"$entry/head"
}

# Whether the address may be used: one without encryption must be asked for, or be this host's own
allowed() { [[ "$url" == https://* || "$insecure" == 1 || "$url_host" =~ ^(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?$ ]]; }

asked_pause=$'\nretry-after: *([0-9]{1,6})'

# One try. Usage: try SECONDS; sets `status` (000 without an answer), `pause` (what the server asks for)
try() {
  local answer header
  answer=$(
    {
      printf 'url = "%s"\n' "$url"
      [[ -z "$proxy" ]] || printf 'proxy = "%s"\n' "$proxy"
      for header in "${headers[@]}"; do printf 'header = "%s"\n' "$header"; done
    } | curl --disable --config - --silent --show-error --globoff --proto =http,https \
      --connect-timeout 8 --max-time "$1" --data-binary @"$entry/body" --output /dev/null --dump-header - \
      --write-out '\n%{http_code}\n' 2>"$entry/error" | tail -c 65536 # older curls bound no headers
  )
  status=${answer##*$'\n'}
  [[ "$status" =~ ^[0-9]{3}$ ]] || status=000
  pause=
  [[ ! "${answer,,}" =~ $asked_pause ]] || pause=$((10#${BASH_REMATCH[1]}))
  text=$(head -c 500 "$entry/error" 2>/dev/null | tr '\n' ' ' | plain)
  redact
  why="status $status${text:+ ($text)}"
}

# Tries until it arrives, is refused, or the time is over. Usage: send TARGET; returns 0, 1 (try later) or 2 (never)
send() {
  local name=$1 delay=1 left
  why="no time left"
  command -v curl >/dev/null || { why="curl is not installed on $host"; return 1; }
  [[ -n "$url" ]] || { why="its address is not in $secrets/$name"; return 1; }
  allowed || { why="its address is not https"; return 2; }
  while left=$((deadline - SECONDS)) && ((left > 0)); do
    try "$left"
    case $status in
      2??) return 0 ;;
      408 | 429 | 1?? | 5?? | 000) ;;
      3??) return 1 ;; # a redirect names another server, which must not get the message
      *) return 2 ;;
    esac
    ((SECONDS + ${pause:-$delay} < deadline)) || return 1
    sleep "${pause:-$delay}"
    delay=$((2 * delay))
  done
  return 1
}

tell() { # Usage: tell PAYLOAD
  local name=${1##*/} code=1 entry url url_host kept
  local leave proxy insecure escape room headers body filled
  compose "$1" || return 0
  ! grep -Fxqs "$key $name" "$run/alerts/sent" || return 0
  store "$name"
  [[ -n "$entry" ]] || return 0
  address "$name"
  if [[ "$leave" == login ]]; then why="messages leave this site from the login node"; else send "$name"; code=$?; fi
  rm -f "$entry/error"
  if ((code == 0)); then
    printf '%s %s\n' "$key" "$name" >>"$run/alerts/sent"
    rm -rf "$entry"
    event "$name" true false
    return 0
  fi
  kept=$spool/$key.$name
  ((code != 2)) || { mkdir -p "$run/alerts/refused"; kept=$run/alerts/refused/$key.$name; }
  if mv "$entry" "$kept"; then
    [[ "$leave" == login ]] || complain "target $name: $why; kept in $kept"
    event "$name" false "$([[ $code == 2 ]] && echo false || echo true)"
  else
    complain "target $name: $why; cannot move it to the spool, so it stays in $entry"
  fi
}

for file in "$secrets"/*; do
  address "${file##*/}"
  [[ -z "$url" ]] || learn
done
[[ ! -r "$secrets/.environment" ]] || while IFS= read -r -d '' pair; do # the values of environment_from
  pair=${pair#*=}
  ((${#pair} < 8)) || words+=("$pair")
done <"$secrets/.environment"
gather "${@:2}"
[[ -d "$run/payloads" ]] || complain "$run/payloads is missing: was the file system purged? No alert is sent"
# Each by itself: a slow one must not hold up the others.
for file in "$run"/payloads/*; do
  [[ ! -f "$file" ]] || tell "$file" >/dev/null &
done
wait
exit 0
