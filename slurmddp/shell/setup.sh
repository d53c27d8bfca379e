# shellcheck shell=bash
# The setup lines of the site and the job, in node.sh's own shell: `module` and conda need one without -e and -u. Sourced,
# and not a function: what a line declares stays.
set +eu
type module >/dev/null 2>&1 || source /etc/profile
python_before=$(command -v python3)
# A setup line, or a script that it sources, may call `exit`: without this function node.sh would exit without a message.
# An EXIT trap would also run at a SIGTERM, which the setup line did not cause.
# A linter sees no call of it, so it is text for eval.
eval 'exit() {
  local code=${1-$?}
  ((BASH_SUBSHELL == 0)) || builtin exit "$code"
  fail user "setup line exited with code $code: $line"
}'
for line in "${setup[@]}"; do
  eval "$line" || fail user "setup line failed with exit code $?: $line"
done
unset -f exit
set -eu
[[ -z "$python_of_setup" || "$(command -v python3)" == "$python_before" ]] ||
  python=python3 # setup has brought one: activate, conda, a module
finished=yes
