#!/bin/bash
# Starts a program of the run's code with a Python of this node: python.sh PYTHON FILE ARGUMENT...
# PYTHON: of the machine that submitted the job. It may lie on a shared disk, whose outage a job has to survive, so the
# node's own come first. Nothing is run of a folder that another user has put in the place of the run's: the one that is
# open here is the one that was looked at.
run=${2%/code/slurmddp/supervisor/*}
{ exec 9<"$run" && [[ -O /proc/self/fd/9 ]]; } 2>/dev/null || { printf 'slurmddp: %s is not yours, or not there\n' "$run" >&2; exit 98; }
for python in /usr/bin/python3 /usr/libexec/platform-python "$1"; do
  ! "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null || exec "$python" -IB "/proc/self/fd/9${2#"$run"}" "${@:3}"
done
printf 'slurmddp: no Python 3.6 or newer on %s, neither /usr/bin/python3 nor %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$1" >&2
exit 96
