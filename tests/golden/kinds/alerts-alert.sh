#!/bin/bash
# gpt-books: tells people what has become of the job. Usage: bash RUN_FOLDER/alert.sh KIND STATE CAUSE NEXT
#
# It takes SLURMDDP_ALERT_BUDGET seconds (30) at most, always ends with 0, and prints nothing on stdout. A message is
# laid into RUN_FOLDER/alerts/spool before it is sent and taken away once it has arrived: whatever ends this script, the
# next command on the login node finds it there. The targets' addresses are secrets: they lie in files outside of the
# run folder, and curl gets them on its standard input.
set -uo pipefail
shopt -s extglob
umask 077
export LC_ALL=C # bytes, not characters: a log may hold anything

kind=${1:?usage: alert.sh KIND STATE CAUSE NEXT}
budget=${SLURMDDP_ALERT_BUDGET:-30}
[[ "$budget" =~ ^[0-9]{1,5}$ ]] || budget=30
deadline=$((SECONDS + 10#$budget))
run=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run_id=${run##*/}
job_name=gpt-books
site=testcluster
leave=node
proxy=''
secrets=${XDG_CONFIG_HOME:-${HOME:-}/.config}/slurmddp/secrets/$run_id
spool=$run/alerts/spool
host=${SLURMD_NODENAME:-${HOSTNAME:-}}
job_id=${SLURMDDP_JOB_ID:-${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}}
job_id=${job_id:-${SLURM_JOB_ID:-}}
now=$(date +%s)

complain() { printf 'slurmddp: alert %s: %s\n' "$kind" "$*" >&2; }

# --- text of any bytes into text that can be shown: UTF-8, no control characters but line breaks and tabs, no colours
# By way of UTF-16, which cannot hold what UTF-8 must not: iconv alone lets codes above U+10FFFF through. The rest are
# the control characters above U+007F and those that turn the direction of text, or end a line: U+061C, U+200E,
# U+200F, U+2028 to U+202E, U+2066 to U+2069. They go last: of valid text, nothing else is made by taking them out.
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

# One line of plain text, secrets replaced, of at most $2 bytes. Usage: line TEXT BYTES; the answer is in `text`.
line() {
  text=$(printf '%s' "${1:0:16384}" | tr '\n\t' '  ' | plain)
  redact
  head_of "$2"
}

# The first bytes of `text`, and no part of a character. Usage: head_of BYTES
head_of() {
  ((${#text} > $1)) || return 0
  text=${text:0:$1}
  text=${text%[$'\xc0'-$'\xff']*([$'\x80'-$'\xbf'])}...
}

# The last bytes of `text` from the beginning of a line, or else of a character. Usage: tail_of BYTES
tail_of() {
  ((${#text} > $1)) || return 0
  text=${text:${#text}-$1}
  if [[ "$text" == *$'\n'* ]]; then text=${text#*$'\n'}; else text=${text##+([$'\x80'-$'\xbf'])}; fi
}

# --- the secrets: what must not stand in a message. Of each address the whole, its path, and each long part.
words=()
address() { # Usage: address NAME; the answers, `url` and `url_host`, are empty where there is none
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

# --- JSON, of text that is plain
backslash=\\
json() { # Usage: json TEXT; the answer, with its quotes, is in `quoted`
  quoted=${1//"$backslash"/"$backslash$backslash"}
  quoted=${quoted//'"'/"$backslash"'"'}
  quoted=${quoted//$'\n'/"$backslash"n}
  quoted='"'${quoted//$'\t'/"$backslash"t}'"'
}
member() { # Usage: member KEY TEXT, into `object`
  json "$2"
  object+="${object:+, }\"$1\": $quoted"
}
number() { # Usage: number KEY DIGITS, into `object`; null where they are none
  if [[ "$2" =~ ^[0-9]{1,15}$ ]]; then object+="${object:+, }\"$1\": $((10#$2))"; else object+="${object:+, }\"$1\": null"; fi
}
or_null() { # Usage: or_null KEY TEXT, into `object`; null where it is empty
  if [[ -n "$2" ]]; then member "$1" "$2"; else object+="${object:+, }\"$1\": null"; fi
}

# --- what is told
rank_on_node='rank ([0-9]{1,9}) on (node )?([A-Za-z0-9][A-Za-z0-9._-]*)'
named_node='(^|[^A-Za-z])node ([A-Za-z0-9][A-Za-z0-9._-]*)'
first_word='^()([A-Za-z0-9][A-Za-z0-9._-]*): '
gather() {
  local each
  attempt=${SLURMDDP_ATTEMPT:-}
  logs=${SLURMDDP_LOGS:-}
  if [[ -z "$attempt" ]]; then
    for each in "$run"/logs/attempt-*; do [[ ! "$each" =~ -([0-9]{3,9})$ ]] || attempt=$((10#${BASH_REMATCH[1]})); done
  fi
  [[ "$attempt" =~ ^[0-9]{1,9}$ ]] || attempt=0
  attempt=$((10#$attempt))
  [[ -n "$logs" ]] || printf -v logs '%s/logs/attempt-%03d' "$run" "$attempt"
  step=
  steps=
  [[ ! -r "$run/progress" ]] || read -r step steps _ <"$run/progress"
  [[ "$step" =~ ^[0-9]{1,15}$ ]] || step=
  [[ -n "$step" && "$steps" =~ ^[0-9]{1,15}$ ]] || steps=
  line "${2:-}" 120
  state=$text
  line "${3:-}" 600
  cause=$text
  line "${4:-}" 400
  next=$text
  line "$run" 4096
  folder=$text
  node=
  rank=
  if [[ "$cause" =~ $rank_on_node ]]; then
    rank=${BASH_REMATCH[1]} node=${BASH_REMATCH[3]}
  elif [[ "$cause" =~ $named_node || "$cause" =~ $first_word ]]; then
    node=${BASH_REMATCH[2]}
  fi
  node=${node%[.-]}
  key=$run_id.$attempt.$kind
  [[ "$kind" != stopping ]] || key+=.$state # it is asked to stop, and has stopped
  # These may happen more than once in an attempt; the others are one and the same fact.
  [[ "$kind" != @(hang|recovered) ]] || key+=.$now
  excerpt
}

# The end of the log that the cause speaks of, else of the one that was written last.
excerpt() {
  local each
  log=
  if [[ -n "$node" && -s "$logs/$node.log" ]]; then
    log=$logs/$node.log
  else
    for each in "$logs"/*.log; do [[ ! -s "$each" ]] || [[ -n "$log" && ! "$each" -nt "$log" ]] || log=$each; done
    [[ -n "$log" || ! -s "$run/logs/job.log" ]] || log=$run/logs/job.log
  fi
  text=
  if [[ -n "$log" ]]; then
    # Cut twice: an address must be whole when it is looked for, and none is longer than 2000 bytes.
    text=$(tail -c 65536 -- "$log" 2>/dev/null | { if (($(wc -c <"$log") > 65536)); then tail -c +2049; else cat; fi; } \
      | plain | grep -v '^[[:space:]]*$' | tail -n 15 | cut -b 1-4096)
    redact
    text=$(printf '%s' "$text" | cut -b 1-300 | valid)
    tail_of 4500
  fi
  tail_text=$text
}

sentences() {
  case $kind in
    started) verb="has started" ;;
    requeued) verb="was requeued" ;;
    recovered) verb="has recovered" ;;
    hang) verb="hangs" ;;
    stopping) verb="is stopping" ;;
    failed) verb="has FAILED" ;;
    finished) verb="has finished" ;;
    *) verb=$kind ;;
  esac
  title="$job_name $verb"
  about="job ${job_id:-?} at $site, attempt $attempt${state:+, $state}"
  progress="no step yet"
  [[ -z "$step" ]] || progress="step $step${steps:+ of $steps}"
  ((${steps:-0} == 0)) || progress+=" ($((100 * 10#$step / 10#$steps)) %)"
  look="slurmddp status $run_id; slurmddp logs $run_id"
}

# --- what each kind of target takes; the answer is in `body`, further headers in `headers`
to_json() {
  object=
  object+='"schema": 1'
  member key "$key"
  member kind "$kind"
  number time "$now"
  or_null site "$site"
  member job "$job_name"
  or_null job_id "$job_id"
  member run "$run_id"
  member folder "$folder"
  number attempt "$attempt"
  or_null state "$state"
  number step "$step"
  number steps "$steps"
  or_null cause "$cause"
  or_null node "$node"
  number rank "$rank"
  or_null next "$next"
  member command "$look"
  line "$log" 4096
  or_null log "$text"
  member log_tail "$tail_text"
  body="{$object}"
}

# Lines of markup whose values are literal: between backticks, which the values have none of.
marked() { # Usage: marked BOLD BYTES (of the whole, at most)
  local bold=$1 room value rest=
  for value in "$about, $progress" "cause: ${cause:0:400}" "next: ${next:0:250}" "run: ${folder:0:300}" "look: $look"; do
    [[ "$value" == *": " ]] || rest+=$'\n'"\`${value//\`/\'}\`"
  done
  text=$rest
  rest=$(printf '%s' "$text" | valid)
  rest="$bold${title}$bold$rest"
  room=$(($2 - ${#rest} - 10))
  text=${tail_text//\`/\'}
  tail_of "$((room > 0 ? room : 0))"
  [[ "$room" -lt 80 || -z "$text" ]] || rest+=$'\n```\n'"$text"$'\n```'
  text=$rest
}
to_slack() {
  marked '*' 3000
  text=${text//&/"&amp;"}
  text=${text//</"&lt;"}
  text=${text//>/"&gt;"}
  json "$text"
  body="{\"text\": $quoted, \"unfurl_links\": false, \"unfurl_media\": false}"
}
to_discord() {
  marked '**' 1900
  head_of 1990
  json "$text"
  # No mention of anybody, no preview of links (flag 4).
  body="{\"content\": $quoted, \"allowed_mentions\": {\"parse\": []}, \"flags\": 4}"
}

# An Adaptive Card of text runs, which know no markup; a line each, since a run has no line breaks.
run_of_text() { # Usage: run_of_text TEXT MORE, into `object`
  json "$1"
  object+="${object:+, }{\"type\": \"RichTextBlock\"$2, \"inlines\": [{\"type\": \"TextRun\", \"text\": $quoted$3}]}"
}
to_teams() {
  local each small=', "fontType": "Monospace", "size": "Small"'
  object=
  run_of_text "$title" "" ', "weight": "Bolder", "size": "Medium"'
  for each in "$about, $progress" "cause: $cause" "next: $next" "run: $folder" "look: $look"; do
    [[ "$each" == *": " ]] || run_of_text "$each" ', "spacing": "Small"' ""
  done
  while IFS= read -r each; do
    [[ -z "$each" ]] || run_of_text "$each" ', "spacing": "None"' "$small"
  done < <(printf '%s\n' "$tail_text")
  body='{"type": "message", "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "contentUrl": null, '
  body+='"content": {"'"\$"'schema": "http://adaptivecards.io/schemas/adaptive-card.json", "type": "AdaptiveCard", "version": "1.4", '
  body+="\"msteams\": {\"width\": \"Full\"}, \"body\": [$object]}}]}"
}

# Plain text; the rest goes into headers. A message with the id of an earlier one takes its place.
to_ntfy() {
  local priority=3
  [[ "$kind" != @(failed|hang) ]] || priority=4
  [[ "$kind" != started ]] || priority=2
  text="$about, $progress"
  [[ -z "$cause" ]] || text+=$'\n'"cause: $cause"
  [[ -z "$next" ]] || text+=$'\n'"next: $next"
  text+=$'\n'"run: $folder"$'\n'"look: $look"
  head_of 2000
  body=$text
  text=$tail_text
  tail_of "$((3800 - ${#body}))"
  body+=${text:+$'\n\n'$text}
  headers+=("Title: $title" "Priority: $priority" "Tags: slurmddp,$kind")
  headers+=("X-Sequence-ID: $(printf '%s' "$key" | sha256sum | cut -c 1-32)")
}

# --- sending
event() { # Usage: event TARGET DELIVERED SPOOLED
  printf '{"time": %s, "event": "alert", "attempt": %d, "job_id": "%s", "node": "%s", "kind": "%s", "target": "%s", "delivered": %s, "spooled": %s}\n' \
    "$(date +%s.%3N)" "$attempt" "$job_id" "$host" "$kind" "$1" "$2" "$3" >>"$run/events.jsonl"
}

# The message on disk: in the spool as one that is being sent, or, where the disk is full, in a folder of this host.
lay() { # Usage: lay TARGET; the answer is in `entry`, empty where the message lies there already
  local id=$key.$1 place
  entry=
  mkdir -p "$spool" 2>/dev/null
  [[ ! -e "$spool/$id" ]] || return 0
  if mkdir "$spool/.$id" 2>/dev/null; then
    entry=$spool/.$id
    fill "$1" && return 0
    rm -rf "$entry"
  elif [[ -d "$spool/.$id" ]]; then
    return 0
  fi
  for place in "${TMPDIR:-/tmp}" /tmp /dev/shm; do
    entry=$(mktemp -d "$place/slurmddp-alert-XXXXXXXX" 2>/dev/null) || continue
    fill "$1" && return 0
    rm -rf "$entry"
  done
  entry=
  complain "cannot be written anywhere for target $1"
}
fill() { # the body first: where there is a head, the message is whole
  printf '%s' "$body" 2>/dev/null >"$entry/body" && {
    printf 'slurmddp-alert 1\ntarget %s\nkey %s\nkind %s\ninsecure %s\nuntil %s\n' \
      "$1" "$key" "$kind" "$insecure" "$((now + 10#$budget + 15))"
    printf 'header %s\n' "${headers[@]}"
  } 2>/dev/null >"$entry/head"
}

# Whether the address may be used: what is not encrypted must be asked for, or stay on this host.
allowed() { [[ "$url" == https://* || "$insecure" == 1 || "$url_host" =~ ^(localhost|127\.[0-9.]+|\[::1\])(:[0-9]+)?$ ]]; }

asked_pause=$'\nretry-after: *([0-9]{1,6})'

# One try. Sets status (000 where there was no answer), pause (what the server asks for), took (seconds).
try() {
  local answer header
  answer=$(
    {
      printf 'url = "%s"\n' "$url"
      [[ -z "$proxy" ]] || printf 'proxy = "%s"\n' "$proxy"
      for header in "${headers[@]}"; do printf 'header = "%s"\n' "$header"; done
    } | curl --disable --config - --silent --show-error --globoff --proto =http,https \
      --connect-timeout 8 --max-time "$1" --data-binary @"$entry/body" --output /dev/null --dump-header - \
      --write-out '\n%{http_code} %{time_total}\n' 2>"$entry/error"
  )
  read -r status took <<<"${answer##*$'\n'}"
  [[ "$status" =~ ^[0-9]{3}$ ]] || status=000
  pause=
  [[ ! "${answer,,}" =~ $asked_pause ]] || pause=$((10#${BASH_REMATCH[1]}))
  text=$(head -c 500 "$entry/error" 2>/dev/null | tr '\n' ' ' | plain)
  redact
  why="status $status${text:+ ($text)}"
}

send() { # Usage: send TARGET
  local name=$1 delay=1 left
  why="there is no time left"
  command -v curl >/dev/null || { why="there is no curl on $host"; return 1; }
  [[ -n "$url" ]] || { why="its address is not in $secrets/$name"; return 1; }
  allowed || { why="its address is not https"; return 2; }
  while left=$((deadline - SECONDS)) && ((left > 0)); do
    try "$left"
    [[ -z "${SLURMDDP_ALERT_REPORT:-}" ]] || printf '%s %s %s %s\n' "$name" "$kind" "$status" "${took:-0}" >>"$SLURMDDP_ALERT_REPORT"
    case $status in
      2??) return 0 ;;
      408 | 429 | 5?? | 000) ;;
      3??) return 1 ;; # a redirect leads elsewhere: the message is not for whoever is there
      *) return 2 ;;
    esac
    ((SECONDS + ${pause:-$delay} < deadline)) || return 1
    sleep "${pause:-$delay}"
    delay=$((2 * delay))
  done
  return 1
}

tell() { # Usage: tell TARGET KIND_OF_TARGET INSECURE
  local name=$1 code=1 entry headers=("Idempotency-Key: $key") body url url_host
  insecure=$3
  ! grep -Fxqs "$key $name" "$run/alerts/sent" || return 0
  if [[ "$2" == ntfy ]]; then headers+=("Content-Type: text/plain; charset=utf-8"); else headers+=("Content-Type: application/json"); fi
  case $2 in
    slack) to_slack ;;
    discord) to_discord ;;
    teams) to_teams ;;
    ntfy) to_ntfy ;;
    *) to_json ;;
  esac
  lay "$name"
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
  local kept=$spool/$key.$name
  ((code != 2)) || { mkdir -p "$run/alerts/refused"; kept=$run/alerts/refused/$key.$name; }
  if mv "$entry" "$kept"; then
    [[ "$leave" == login ]] || complain "target $name: $why; kept in $kept"
    event "$name" false "$([[ $code == 2 ]] && echo false || echo true)"
  else
    complain "target $name: $why; and it cannot be kept: it lies in $entry"
  fi
}

# --- who hears of what
for file in "$secrets"/*; do
  address "${file##*/}"
  [[ -z "$url" ]] || learn
done
[[ ! -r "$secrets/.environment" ]] || while IFS= read -r -d '' pair; do
  pair=${pair#*=}
  ((${#pair} < 8)) || words+=("$pair")
done <"$secrets/.environment"
gather "$@"
sentences
# Each by itself: a slow one must not hold up the others.
[[ "$kind" != @(requeued|recovered|hang|stopping|failed|finished) ]] || tell slack slack 0 >/dev/null &
[[ "$kind" != @(failed) ]] || tell json json 0 >/dev/null &
wait
exit 0
