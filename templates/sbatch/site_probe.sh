#!/bin/bash
# slurmddp site init --probe: says what this node has, as lines `slurmddp-probe KEY VALUE`. It changes nothing.
export LC_ALL=C

say() { # KEY WORD...
  printf 'slurmddp-probe %s\n' "$*"
}
lines() { # KEY COMMAND...: each line that the command prints; one that hangs ends after 20 s
  local key=$1 line
  shift
  while IFS= read -r line; do say "$key" "$line"; done < <(timeout 20 "$@" 2>/dev/null </dev/null)
}
file() { # PATH: its first line
  local text=
  { read -r text <"$1"; } 2>/dev/null
  printf '%s' "$text"
}
limits() { # FOLDER PATH FILE: the memory limit of a cgroup and of those above it
  local path=$2
  while :; do
    [[ -r $1$path/$3 ]] && say memory_limit "$(file "$1$path/$3")"
    [[ -n $path ]] || return
    path=${path%/*}
  done
}

say node "${SLURMD_NODENAME:-$HOSTNAME}"
say architecture "$(uname -m)"
say cpus "$(nproc)"
while read -r name value _; do
  [[ $name == MemTotal: ]] && say memory_kb "$value"
done </proc/meminfo
while IFS=: read -r number controllers path; do
  [[ $number == 0 && -z $controllers ]] && limits /sys/fs/cgroup "${path%/}" memory.max
  [[ ,$controllers, == *,memory,* ]] && limits /sys/fs/cgroup/memory "${path%/}" memory.limit_in_bytes
done </proc/self/cgroup
lines shm df -Pk /dev/shm
say tmpdir "${TMPDIR:-}"
lines tmp df -Pk "${TMPDIR:-/tmp}"
say memlock "$(ulimit -l)"
say open_files "$(ulimit -n)"

# GPUs
for device in /dev/nvidia[0-9]* /dev/kfd /dev/dri/renderD*; do
  [[ -e $device ]] && say device "$device"
done
if command -v nvidia-smi >/dev/null; then
  lines nvidia nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
  lines topology nvidia-smi topo -m
fi
if command -v rocm-smi >/dev/null; then
  lines amd rocm-smi --showproductname --csv
  lines topology rocm-smi --showtopotype
fi
[[ -r /sys/module/amdgpu/version ]] && say amd_driver "$(file /sys/module/amdgpu/version)"

# Network
for port in /sys/class/infiniband/*/ports/*; do
  [[ -d $port ]] || continue
  device=${port%/ports/*}
  driver=$(readlink "$device/device/driver")
  say port "${device##*/}|${port##*/}|$(file "$port/state")|$(file "$port/rate")|$(file "$port/link_layer")|${driver##*/}"
done
for device in /sys/class/cxi/*; do
  [[ -e $device ]] && say slingshot "${device##*/}"
done
for interface in /sys/class/net/*; do
  say interface "${interface##*/}|$(file "$interface/operstate")"
done
lines address ip -o -4 addr show
while read -r interface destination _; do
  [[ $destination == 00000000 ]] && say default_route "$interface"
done </proc/net/route

# Programs
for program in apptainer singularity enroot; do
  command -v "$program" >/dev/null && lines "$program" "$program" --version
done
for program in scontrol srun python3; do
  command -v "$program" >/dev/null && say program "$program"
done
for program in /usr/bin/python3 /usr/libexec/platform-python; do # of those, job.sh takes the first of 3.6 or newer
  "$program" -I -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null && say supervisor "$program" && break
done
lines module bash -lc 'type module >/dev/null 2>&1 && module -t avail 2>&1 | grep -iE "apptainer|singularity"'
say end
