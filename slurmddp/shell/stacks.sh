#!/bin/bash
# Print where the ranks of an attempt on this node are in their Python code: stacks.sh RENDEZVOUS_ID. Run by `slurmddp
# stacks`. Each line begins with the rank:
#   RANK @ WORLD PID STATE HOW NODE   STATE: as in /proc/PID/status. HOW: asked, signal, silent, absent
#   RANK | a line of faulthandler
# Each rank has memory for its stacks (slurmddp/runtime/watch/own_stacks.py), which grows by "ask": a thread of the rank
# answers there. Where none does, because other code keeps the interpreter locked, SIGURG has the kernel interrupt the
# rank; a process without a handler ignores it.
set -u
export LC_ALL=C
id=${1:?usage: stacks.sh RENDEZVOUS_ID}
host=${SLURMD_NODENAME:-$HOSTNAME}
declare -A rank=() world=() memory=() before=() how=()

value() { # of a variable of a process, into `found`
  found=$(tr '\0' '\n' 2>/dev/null <"/proc/$1/environ" | sed -n "s/^$2=//p;T;q")
}

is_rank() { # the agent has no RANK, and data workers have the rank itself for their parent
  local parent
  value "$1" RANK
  [[ "$found" =~ ^[0-9]+$ ]] || return 1
  rank[$1]=$found
  parent=$(sed -n 's/^PPid:[[:space:]]*//p' "/proc/$1/status" 2>/dev/null)
  value "${parent:-0}" RANK
  [[ -z "$found" ]]
}

length() { stat -L -c %s "${memory[$1]}" 2>/dev/null || echo 0; }
told() { tail -c +"$((before[$1] + 1))" "${memory[$1]}" 2>/dev/null; }

pids=()
while IFS= read -r file; do
  pid=${file//[!0-9]/}
  is_rank "$pid" || continue
  pids+=("$pid")
  value "$pid" WORLD_SIZE
  world[$pid]=$found
  how[$pid]=absent
  for file in "/proc/$pid/fd/"*; do
    [[ "$(readlink "$file")" == "/memfd:slurmddp-stacks"* ]] || continue
    memory[$pid]=$file
    how[$pid]=silent
    before[$pid]=$(length "$pid")
    echo ask 2>/dev/null >>"$file"
  done
done < <(grep -lzsxF -e "SLURMDDP_RENDEZVOUS_ID=$id" /proc/[0-9]*/environ)

for ((round = 0; round < 50; round++)); do # 5 s
  waits=
  for pid in "${!memory[@]}"; do
    [[ "${how[$pid]}" == silent ]] || continue
    if [[ "$(told "$pid" | tail -n 1)" == end ]]; then how[$pid]=asked; else waits=yes; fi
  done
  [[ -n "$waits" ]] || break
  sleep 0.1
done

for pid in "${!memory[@]}"; do
  [[ "${how[$pid]}" == silent ]] || continue
  asked=$(length "$pid")
  kill -URG "$pid" 2>/dev/null
  for ((round = 0; round < 10; round++)); do
    sleep 0.1
    now=$(length "$pid")
    ((now == asked)) || how[$pid]=signal
    [[ "${how[$pid]}" != signal || "${last:-}" != "$pid $now" ]] || break # it has stopped growing
    last="$pid $now"
  done
done

for pid in "${pids[@]}"; do
  state=$(sed -n 's/^State:[[:space:]]*//p' "/proc/$pid/status" 2>/dev/null)
  printf '%s @ %s %s %s %s %s\n' "${rank[$pid]}" "${world[$pid]:-0}" "$pid" "${state%% *}" "${how[$pid]}" "$host"
  [[ "${how[$pid]}" == asked || "${how[$pid]}" == signal ]] || continue
  told "$pid" | sed -e '/^ask$/d' -e '/^end$/d' -e "s/^/${rank[$pid]} | /"
done
