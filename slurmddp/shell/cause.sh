# shellcheck shell=bash
# --- why an attempt failed: RANK NODE TEXT, with a dash for what is unknown
cause_text() { # as people read it
  local rank node text
  read -r rank node text <<<"$1"
  [[ "$node" == - ]] || text="$node: $text"
  [[ "$rank" == - ]] || text="rank $rank on $text"
  printf '%s\n' "$text"
}
# An alert about RANK NODE TEXT. Usage: alert_cause KIND STATE CAUSE NEXT
alert_cause() {
  local rank node _
  read -r rank node _ <<<"$3"
  alert "$1" "$2" "`cause_text "$3"`" "$4" "$rank" "$node"
}

# The rules, which slurmddp/causes reads too. The head of the file says what they mean. The second part of the file is
# for `slurmddp doctor`.
cause_rules=`<"${BASH_SOURCE[0]%/*}/../causes/cause.rules"` || return
cause_rules=${cause_rules%%$'\n'"# ---- "*}
if [[ -n "${tasks_per_node:-}" ]]; then # launch.mode srun: of a key that is given twice, awk takes the last one
  cause_rules=${cause_rules//$'\n'task /$'\n'rank }
  cause_rules=${cause_rules//says_of_task/says}
fi

# Sets two patterns of texts, for =~. `consequence`: what ranks report after another rank has failed. `user_error`: what
# node.sh and the preflight report if the user has to correct something; it would be the same on another node.
read_kinds() {
  local key value kind=
  consequence=
  user_error=
  while read -r key value; do
    case "$key $kind" in
      rule*) kind= ;;
      kind*) kind=$value ;;
      "match consequence") consequence+="${consequence:+|}$value" ;;
      "match user") user_error+="${user_error:+|}$value" ;;
    esac
  done <<<"$cause_rules"
}
read_kinds

# What the ranks reported, unless it is only a consequence of another rank's failure. Usage: best_cause NOTED
best_cause() {
  local found=$1
  if [[ -z "$found" || -n "$noted_cascade" ]]; then
    found=`cause_in_logs "$found"`
  fi
  [[ -n "$found" ]] || found=${1:-- - unknown}
  printf '%s\n' "$found"
}

# What the nodes' logs say, and srun of agents that were killed, by the rules. With NOTED, only what is better than the
# cascade that was noted. RUN/ranks: the node of each rank. slurmddp/causes/find.py does the same: change both.
# Usage: cause_in_logs NOTED
cause_in_logs() {
  local -x LC_ALL=C # Bytes, for each awk. Names in the order that Python sorts them in.
  local path logged=()
  for path in "$logs"/*.log "$logs/srun.err"; do
    [[ ! -e "$path" || "$path" == */nccl.* ]] || logged+=("$path") # mawk stops at a file that is not there
  done
  # As environment variables, since awk changes backslashes in -v. /dev/null: without a log, awk would read stdin.
  rules=$cause_rules noted=$1 ranks=$run/ranks awk '
    # gawk compiles a pattern anew where the one before was another: so the loop over the rules is slow, and few lines
    # come to it. wanted: what a rule matches that could still be better. turns: what changes the meaning of later lines.
    function read_rules(   lines, line, n, key, value, number) {
      lines = split(ENVIRON["rules"], line, "\n")
      for (n = 1; n <= lines; n++) {
        if (line[n] !~ /^[a-z]/) continue
        key = value = line[n]
        sub(/ .*/, "", key)
        sub(/^[a-z_]+ /, "", value)
        if (key == "rule") count++
        if (key == "signal_name") {
          number = value
          sub(/ .*/, "", number)
          sub(/^[0-9]+ /, "", value)
          signal[number] = value
        } else rule[count, key] = value
        if (key == "match" && rule[count, "kind"] == "consequence") {
          cascade = cascade (cascade == "" ? "" : "|") value
          cascade_order = rule[count, "order"] + 0
        }
        if (key == "until" || key == "after") turns = turns (turns == "" ? "" : "|") value
      }
    }
    # What is no better than the best cause is not looked for any more.
    function set_wanted(   i) {
      wanted = ""
      for (i = 1; i <= count; i++) {
        if (rule[i, "in"] == "text" || rule[i, "order"] + 0 > best_order) continue
        if (rule[i, "order"] + 0 == best_order && !((i, "take") in rule)) continue
        wanted = wanted (wanted == "" ? "" : "|") rule[i, "match"]
        if ((i, "after") in rule) wanted = wanted "|" rule[i, "after"]
      }
      if (wanted == "") exit
    }
    function behind(pattern) { return match($0, pattern) ? substr($0, RSTART + RLENGTH) : "" }
    function number_behind(pattern,   text) {
      text = behind(pattern)
      return match(text, /^[0-9]+/) && RLENGTH <= 9 ? substr(text, 1, RLENGTH) + 0 : ""
    }
    # The best cause, if this line of rule i is better
    function judge(i,   text, order, stamp, local_rank, slot, where, rank) {
      text = $0
      if ((i, "text") in rule && match($0, rule[i, "text"])) text = substr($0, RSTART + RLENGTH)
      order = text ~ cascade ? cascade_order : rule[i, "order"] + 0
      stamp = $1 " " $2
      if (order > best_order) return
      if (order == best_order && (!((i, "take") in rule) || order == cascade_order || stamp <= best_stamp)) return
      if ((i, "number") in rule) text = number_behind(rule[i, "number"])
      if ((i, "signal") in rule) {
        text = number_behind(rule[i, "signal"])
        if (text != "") text = text in signal ? signal[text] : "signal " text
      }
      if (text == "") return
      slot = index(rule[i, "says"], "{}")
      if (slot) text = substr(rule[i, "says"], 1, slot - 1) text substr(rule[i, "says"], slot + 2)
      where = node
      if ((i, "node") in rule) {
        where = behind(rule[i, "node"])
        if (match(where, /^[^ :]+/)) where = substr(where, 1, RLENGTH)
        else where = node
      }
      rank = (i, "after") in rule ? told[i] : (i, "rank") in rule ? number_behind(rule[i, "rank"]) : ""
      if ((i, "local_rank") in rule) {
        local_rank = number_behind(rule[i, "local_rank"])
        if ((where, local_rank) in rank_of) rank = rank_of[where, local_rank]
        else if (local_rank != "") text = "local rank " local_rank ": " text
      }
      best = (rank == "" ? "-" : rank) " " where " " text
      best_order = order
      best_stamp = stamp
      set_wanted()
    }
    BEGIN {
      read_rules()
      best_order = ENVIRON["noted"] == "" ? 99 : cascade_order
      set_wanted()
      while ((getline line < ENVIRON["ranks"]) > 0) rank_of[line, places[line]++] = ranks++
    }
    FNR == 1 {
      node = FILENAME
      sub(/.*\//, "", node)
      source = node == "srun.err" ? node : "log"
      sub(/[.]log$/, "", node)
      report_end = 0
      for (i = 1; i <= count; i++) over[i] = began[i] = 0
    }
    length($0) > 2000 { $0 = substr($0, 1, 2000) }
    FNR > report_end && $0 !~ wanted { next }
    { sub(/\r+$/, "") }
    best_order <= cascade_order && FNR > report_end && $0 ~ cascade && $0 !~ turns { next }
    {
      for (i = 1; i <= count; i++) {
        if (rule[i, "in"] != source || over[i]) continue
        if ((i, "after") in rule) {
          if ($0 ~ rule[i, "after"]) {
            began[i] = FNR
            told[i] = ""
            report_end = FNR + 10
            continue
          }
          if (!began[i] || FNR - began[i] > 10) continue
          found = number_behind(rule[i, "rank"])
          if (found != "") told[i] = found
        }
        if ($0 !~ rule[i, "match"] || ((i, "unless") in rule && $0 ~ rule[i, "unless"])) continue
        began[i] = 0
        if ((i, "until") in rule && $0 ~ rule[i, "until"]) over[i] = 1
        else judge(i)
      }
    }
    END { if (best != "") print best }
  ' "${logged[@]}" </dev/null | plain
}
