# shellcheck shell=bash
# --- nodes: those of the allocation that are left, and those of them that train
nodes=()    # that may be used
chosen=()   # that train in this attempt
excluded=() # lost, or found bad: not used again
suspects=() # their agent was killed, or Slurm did not reach them: used again only if there are too few others

# The words that are not in a list, one a line. Usage: without "LIST" WORD...
without() {
  local -A listed=()
  local word
  for word in $1; do listed[$word]=1; done
  shift
  for word in "$@"; do
    [[ -n "${listed[$word]:-}" ]] || printf '%s\n' "$word"
  done
}

# Never use these nodes in this run again. Usage: exclude REASON NODE...
exclude() {
  local reason=$1 node
  shift
  for node in "$@"; do
    note_excluded "$reason" "$node"
  done
  drop_excluded
}

# Usage: note_excluded REASON NODE
note_excluded() {
  excluded+=("$2")
  say "node $2 is excluded: $1"
  event node_excluded "\"excluded\": `json "$2"`, \"reason\": `json "$1"`"
}

# Goes through all nodes: once, however many are excluded
drop_excluded() { lines_of nodes without "${excluded[*]}" "${nodes[@]}"; }

# Slurm removes lost nodes from a job that may lose nodes.
list_nodes() {
  local before=("${nodes[@]}") lost=()
  ask_slurm
  lines_of nodes allocated_nodes
  lines_of lost without "${nodes[*]}" "${before[@]}"
  ((${#lost[@]} == 0)) || exclude "Slurm lost the node" "${lost[@]}"
  drop_excluded
  lost_nodes="${lost[*]}"
}

# Nodes on which srun could start nothing in this attempt, with what it says of each: NODE TEXT, one a line. It ends what
# it has started on the others, so what became of those says nothing.
unreached() {
  sed -n 's/^srun: error: Task launch for [^ ]* failed on node \([^ :]*\): /\1 /p' "$logs/srun.err" 2>/dev/null |
    awk '!seen[$1]++' | plain_lines
}

# Choose the first nodes that are not suspect; the others are spares. False if there are too few.
choose_nodes() {
  lines_of chosen without "${suspects[*]}" "${nodes[@]}"
  ((${#chosen[@]} >= nodes_min)) || chosen=("${nodes[@]}")
  chosen=("${chosen[@]:0:nodes_max}")
  ((${#chosen[@]} >= nodes_min))
}
