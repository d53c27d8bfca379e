#!/bin/bash
# Cleans up a node after an attempt. It kills the processes that the attempt left there,
# removes its shared memory and its folder on the node's own disk, and writes what it found to logs/.../sweep/NODE.
#
# SLURMDDP_SWEEP: the rendezvous id of the attempt; SLURMDDP_RUN, SLURMDDP_LOGS: as in its steps; SLURMDDP_STARTED: when
# it began, in seconds since 1970; SLURMDDP_NODE_FOLDER: paths.node. Other attempts, runs and jobs of the same user may be on this node: what is not
# certainly the attempt's stays.
set -uo pipefail
export LC_ALL=C

attempt=${SLURMDDP_SWEEP:?names the attempt to clean up after: its rendezvous id}
run=${SLURMDDP_RUN:?the run folder}
logs=${SLURMDDP_LOGS:?the folder of the logs of the attempt}
node_folder=${SLURMDDP_NODE_FOLDER:?a folder on the disk of the node}
job=${SLURM_JOB_ID:-}
host=${SLURMD_NODENAME:-$HOSTNAME}
[[ "${SLURMDDP_SCHEDULER:-slurm}" == slurm ]] || host=$HOSTNAME

# --- processes
declare -A parent=() mine=() name=() session=() started_at=() # by process id; `parent` has all users'
declare -A kept=() doomed=() killed=() mapped=()

# Process id, parent, state, whose, session, name: a line each. Processes come and go while this reads.
table() {
  cat /proc/[0-9]*/status 2>/dev/null | awk -v user="$UID" '
    function tell() {if (pid) print pid, parent, state, own, session, name}
    /^Name:/ {tell(); pid = own = session = 0; name = $0; sub(/^Name:[ \t]*/, "", name)}
    /^State:/ {state = $2}
    /^Pid:/ {pid = $2}
    /^PPid:/ {parent = $2}
    /^Uid:/ {own = ($2 == user)}
    /^NSsid:/ {session = $2}
    END {tell()}'
}

read_table() {
  local pid above how own leader called
  parent=() mine=() name=() session=()
  while read -r pid above how own leader called; do
    parent[$pid]=$above
    [[ $own == 1 && $how != [ZX] ]] || continue # a zombie is dead; its parent has not asked yet
    mine[$pid]=1
    name[$pid]=$called
    session[$pid]=$leader
  done < <(table)
}

# The time at which a process began, in ticks: with it, its number is unique. Fails where it is gone.
begin_of() {
  local text
  { IFS= read -r -d '' text || [[ -n "$text" ]]; } 2>/dev/null <"/proc/$1/stat" || return 1
  read -ra fields <<<"${text##*) }"
  printf '%s\n' "${fields[19]}"
}

# Reads a process's environment. Fails where it may not be read. Sets
#   id: its rendezvous id;  of_job: its job;  ranks: whether node.sh or torchrun started it;  sweeps: whether it is a sweep
read_environment() {
  local line lines
  id='' of_job='' ranks='' sweeps=''
  mapfile -d '' -t lines 2>/dev/null <"/proc/$1/environ" || return 1
  ((${#lines[@]} > 0)) || return 1
  for line in "${lines[@]}"; do
    case $line in
    SLURMDDP_RENDEZVOUS_ID=*) id=${line#*=} ;;
    APPTAINERENV_SLURMDDP_RENDEZVOUS_ID=* | SINGULARITYENV_SLURMDDP_RENDEZVOUS_ID=*) id=${id:-${line#*=}} ;;
    TORCHELASTIC_RUN_ID="$attempt") id=${id:-$attempt} ranks=1 ;;
    SLURMDDP_NODE=* | APPTAINERENV_SLURMDDP_NODE=* | SINGULARITYENV_SLURMDDP_NODE=* | SLURMDDP_STEP=*) ranks=1 ;;
    SLURM_JOB_ID=*) of_job=${line#*=} ;;
    SLURMDDP_SWEEP=*) sweeps=1 ;;
    esac
  done
}

# Whether a process is the attempt's by its own environment. job.sh and its helpers have the id as well, but not what
# node.sh adds; and a job that a rank has submitted inherits all of it but the number of the job.
belongs() {
  read_environment "$1" && [[ "$id" == "$attempt" && -n "$ranks" && -z "$sweeps" && "${of_job:-$job}" == "$job" ]]
}

# Whether a process belongs to something else by its own environment
foreign() {
  read_environment "$1" && [[ "${id:-$attempt}" != "$attempt" || -n "$sweeps" || "${of_job:-$job}" != "$job" ]]
}

# Whether a process is this script, one of its ancestors or children, or belongs to the guard of this run
shielded() {
  local at=$1 word words
  [[ -z "${kept[$at]:-}" ]] || return 0
  while [[ -n "${parent[$at]:-}" ]]; do
    ((at != $$)) || return 0
    if [[ -n "${mine[$at]:-}" ]] && mapfile -d '' -t words 2>/dev/null <"/proc/$at/cmdline"; then
      for word in "${words[@]:0:3}"; do
        [[ "$word" != "$run/code/slurmddp/shell/guard.sh" ]] || return 0
      done
    fi
    at=${parent[$at]}
  done
  return 1
}

# The file system of a container whose parent was killed: it has lost its environment and its parent, not its session
is_orphaned_mount() {
  [[ " $sessions " == *" ${session[$1]} "* && -z "${mine[${parent[$1]}]:-}" ]] || return 1
  case ${name[$1]} in
  squashfuse | squashfuse_ll | fuse2fs | fuse-overlayfs | gocryptfs) return 0 ;;
  esac
  return 1
}

# Fills `doomed`: processes with the attempt's environment, and what they started that says nothing else of itself
find_doomed() {
  local file pid at grown
  kept=() doomed=()
  at=$$
  while [[ -n "${parent[$at]:-}" ]]; do
    kept[$at]=1
    at=${parent[$at]}
  done
  while IFS= read -r file; do
    pid=${file//[!0-9]/}
    [[ -n "${mine[$pid]:-}" ]] && belongs "$pid" && ! shielded "$pid" && doom "$pid"
  done < <(grep -lzsxF -e "SLURMDDP_RENDEZVOUS_ID=$attempt" -e "APPTAINERENV_SLURMDDP_RENDEZVOUS_ID=$attempt" \
    -e "SINGULARITYENV_SLURMDDP_RENDEZVOUS_ID=$attempt" -e "TORCHELASTIC_RUN_ID=$attempt" /proc/[0-9]*/environ)
  for pid in "${!mine[@]}"; do
    is_orphaned_mount "$pid" && ! shielded "$pid" && doom "$pid"
  done
  while
    grown=0
    for pid in "${!mine[@]}"; do
      if [[ -z "${doomed[$pid]:-}" && -n "${doomed[${parent[$pid]}]:-}" ]] && ! foreign "$pid" && ! shielded "$pid"; then
        doom "$pid" && grown=1
      fi
    done
    ((grown))
  do :; done
}

doom() {
  local begin
  begin=$(begin_of "$1") || return 1
  doomed[$1]=1
  started_at[$1]=$begin
}

# Names of the shared memory that a process maps, with their inodes. Those of another device say nothing: a container
# may have a /dev/shm of its own.
segments_of() {
  awk -v device="$device_in_maps" '
    $4 == device && $6 ~ "^/dev/shm/" {sub("^/dev/shm/", "", $6); print $5, $6}' "/proc/$1/maps" 2>/dev/null
}

# Inodes of the shared memory that a process holds open
opened_by() {
  stat -L -c '%d %i' "/proc/$1/fd/"* 2>/dev/null | awk -v device="$device" '$1 == device {print $2}'
}

end_processes() {
  local pid segment round left
  for ((round = 0; round < 60; round++)); do
    read_table
    find_doomed
    left=0
    for pid in "${!doomed[@]}"; do
      while read -r segment; do mapped[$segment]=1; done < <(segments_of "$pid")
      # The number may be another process's by now.
      [[ "$(begin_of "$pid")" == "${started_at[$pid]}" ]] && kill -KILL "$pid" 2>/dev/null && killed[$pid]=${name[$pid]}
      left=1
    done
    # One that ends has no environment any more, but is not gone before it is a zombie.
    for pid in "${!killed[@]}"; do
      [[ -n "${mine[$pid]:-}" && "$(begin_of "$pid")" == "${started_at[$pid]}" ]] && left=1
    done
    ((left)) || return 0
    sleep 0.1
  done
  printf 'slurmddp: node %s: processes of %s are still running\n' "$host" "$attempt" >&2
}

# --- shared memory: names that torch, NCCL, Python's multiprocessing and OpenMP give
is_known() {
  case $1 in
  torch_* | nccl-* | psm_* | sem.mp-* | sem.loky-* | pym-* | __KMP_REGISTERED_LIB_*) return 0 ;;
  esac
  return 1
}

# Sets `strangers`, the processes of this user that may use shared memory, now or by its name later on; and `used`, the
# inodes that they map or hold open. What cannot be read may do that, too.
declare -A used=()
strangers=0 # how many
find_users() {
  local pid inode rest others=()
  used=() strangers=0
  read_table
  for pid in "${!mine[@]}"; do
    case ${name[$pid]} in
    # The shells and commands of our own scripts, and what a log-in leaves: none of them uses shared memory.
    bash | sh | slurm_script | srun | scontrol | sleep | curl | timeout | systemd | "(sd-pam)" | sshd) ;;
    *) shielded "$pid" || [[ ! -e /proc/$pid/stat ]] || others+=("$pid") ;;
    esac
  done
  strangers=${#others[@]}
  ((strangers > 0 && ${#mapped[@]} > 0)) || return 0 # either there is nobody, or nothing is certain enough to go
  for pid in "${others[@]}"; do
    while read -r inode rest; do used[$inode]=1; done < <(segments_of "$pid"; opened_by "$pid")
  done
}

# Whether something was made since the attempt began; nothing was where nobody knows when that was
since_start() {
  [[ "$start" =~ ^[0-9]+$ ]] && ((start > 0 && $1 >= start))
}

candidates() {
  local path
  for path in /dev/shm/*; do
    is_known "${path##*/}" && [[ -f "$path" && ! -L "$path" && -O "$path" ]] && printf '%s\0' "$path"
  done
}

remove_segments() {
  local path file inode born changed
  for path; do
    file=${path##*/}
    read -r inode born changed < <(stat -c '%i %W %Y' "$path" 2>/dev/null) || continue
    [[ -z "${used[$inode]:-}" ]] || continue
    [[ "$born" =~ ^[1-9][0-9]*$ ]] || born=$changed
    # Either one of the processes ended here had it, or nobody is left who could have.
    [[ -n "${mapped["$inode $file"]:-}" ]] || { ((strangers == 0)) && since_start "$born" && since_start "$changed"; } || continue
    rm -f -- "$path" && say segment "$file"
  done
}

# The same for System V's: made by a process that is gone, attached by none
candidates_of_system_v() {
  awk -v user="$UID" 'NR > 1 && $7 == 0 && $8 == user {print $2, $5, $14}' /proc/sysvipc/shm 2>/dev/null
}

remove_system_v() {
  local id maker made segment
  ((strangers == 0)) && command -v ipcrm >/dev/null || return 0
  for segment; do
    read -r id maker made <<<"$segment"
    [[ ! -e /proc/$maker ]] && since_start "$made" && ipcrm -m "$id" 2>/dev/null && say segment "sysv:$id"
  done
}

# --- the report: a line for each thing found, of characters that need no quotes anywhere
found=()
say() { found+=("$1 ${2//[^[:alnum:]._:\/+@ -]/_}"); }

if [[ "$attempt" == */* ]]; then
  printf 'slurmddp: SLURMDDP_SWEEP=%s is no rendezvous id\n' "$attempt" >&2
  exit 0
fi
start=${SLURMDDP_STARTED:-$(stat -c %W "$logs" 2>/dev/null)}
device=$(stat -c %d /dev/shm 2>/dev/null) # an inode's number is unique on its device only
device=${device:-0}
# As the kernel writes it in maps: major and minor number (makedev(3))
printf -v device_in_maps '%02x:%02x' "$(((device >> 8) & 0xfff))" "$((device & 0xff | (device >> 12) & 0xfff00))"

sessions=$(tr '\n' ' ' 2>/dev/null <"$logs/sessions/$host") # which node.sh has noted
end_processes
for pid in "${!killed[@]}"; do say process "$pid ${killed[$pid]}"; done
mapfile -d '' -t segments < <(candidates)
mapfile -t of_system_v < <(candidates_of_system_v)
if ((${#segments[@]} + ${#of_system_v[@]} > 0)); then
  find_users
  remove_segments "${segments[@]}"
  remove_system_v "${of_system_v[@]}"
fi
scratch=$node_folder/slurmddp-$UID
if [[ -d "$scratch" && ! -L "$scratch" && -O "$scratch" ]]; then
  rm -rf --one-file-system -- "${scratch:?}/$attempt" # /tmp and home of a contained container
fi

mkdir -p "$logs/sweep"
if ((${#found[@]} > 0)); then printf '%s\n' "${found[@]}"; fi >"$logs/sweep/.$host.part" &&
  mv "$logs/sweep/.$host.part" "$logs/sweep/$host"
exit 0
