#!/bin/bash
# Starts a program of slurmddp/supervisor with a Python of this node: python.sh PYTHON CODE PROGRAM ARGUMENT...
# PYTHON: of the machine that submitted the job. It may lie on a shared disk, whose outage a job has to survive, so the
# node's own come first. CODE: the run's archive, or the folder that it was unpacked to. Nothing is run of a folder that
# another user has put in the place of the run's: the one that is open here is the one that was looked at.
folder=${2%/code/slurmddp.zip}
{ exec 9<"$folder" && [[ -O /proc/self/fd/9 ]]; } 2>/dev/null || { printf 'slurmddp: %s is not yours, or not there\n' "$folder" >&2; exit 98; }
# Not as `python CODE`: Python takes a truncated archive for a script, and an empty one for a script that succeeds.
start='import sys
sys.path.insert(0, sys.argv.pop(1))
try:
    from slurmddp.supervisor.__main__ import main
except Exception as error:  # a damaged archive raises any
    print("slurmddp: {}: {}".format(sys.path[0], error), file=sys.stderr)
    sys.exit(97)
main()'
for python in /usr/bin/python3 /usr/libexec/platform-python "$1"; do
  ! "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null ||
    exec "$python" -IBc "$start" "/proc/self/fd/9${2#"$folder"}" "${@:3}"
done
printf 'slurmddp: no Python 3.6 or newer on %s, neither /usr/bin/python3 nor %s\n' "${SLURMD_NODENAME:-$HOSTNAME}" "$1" >&2
exit 96
