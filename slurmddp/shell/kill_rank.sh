#!/bin/bash
# Kill one rank of an attempt on this node, as a crash would: kill_rank.sh RENDEZVOUS_ID RANK. Run by `slurmddp rehearse`.
set -u
belongs() { # the agent has no RANK, and data workers have the rank itself for their parent
  grep -qzxF "SLURMDDP_RENDEZVOUS_ID=$id" "/proc/$1/environ" 2>/dev/null && grep -qzxF "RANK=$rank" "/proc/$1/environ" 2>/dev/null
}
id=$1 rank=$2
for process in /proc/[0-9]*; do
  pid=${process#/proc/}
  belongs "$pid" || continue
  parent=$(sed -n 's/^PPid:[[:space:]]*//p' "$process/status" 2>/dev/null)
  belongs "$parent" && continue
  kill -KILL "$pid" && echo "killed $pid"
done
