# Read by bash before the script (BASH_ENV). SANDBOX_FILES=1: a file that the script tests for is there; 0: it is not.
case $0 in /usr/bin/* | /.sandbox/stub) return ;; esac
set -T
__sandbox_path() { # a path as the script wrote it, expanded; nothing that would run a command
    [[ $1 = *[\`\;\&\|\<\>\(\)]* || $1 = *$'\n'* ]] || builtin eval "printf '%s' $1" 2>/dev/null
}
# The script's own variables are seen in here, and BASH_REMATCH is the script's: what may match with =~ does so in a
# subshell, and no local has a name that a script would take.
__sandbox_assigned() { # command: what the assignments before it have left, and which are in it
    local __sandbox_name IFS=' ' -
    set -f
    for __sandbox_name in "${__sandbox_names[@]}"; do
        printf '%s\0' "$SANDBOX_LINE" "$__sandbox_name" "${!__sandbox_name-}"
    done >>/.sandbox/records/assigned
    __sandbox_names=()
    [[ $1 = @(export|declare|local|readonly|typeset)\ * ]] || __sandbox_is_name "${1%%=*}" || return 0
    for __sandbox_name in $1; do
        [[ $__sandbox_name = *=* ]] && __sandbox_is_name "${__sandbox_name%%=*}" || continue
        __sandbox_name=${__sandbox_name%%=*}
        __sandbox_names+=("${__sandbox_name%+}")
    done
}
__sandbox_is_name() { [[ ${1%+} = [A-Za-z_]* && ${1%+} != *[!A-Za-z0-9_]* ]]; }
__sandbox_seen() {
    case ${FUNCNAME[1]-} in cd | pushd | source | . | ulimit | command_not_found_handle | __sandbox_*) return 0 ;; esac
    [[ " $__sandbox_filters " != *" ${FUNCNAME[1]-} "* ]] || return 0
    if [[ ${__sandbox_top-} ]]; then # a line of the script, not of a text for bash -c
        ((BASH_SUBSHELL)) || __sandbox_assigned "$2" 2>/dev/null
        export SANDBOX_LINE=$1
    fi
    case $2 in *[\<\>]* | \[* | [\"\$./~]* | [A-Za-z_]*=*\ [\"\$./~]*) (__sandbox_files "$2") 2>/dev/null ;; esac
    return 0
}
__sandbox_put() { # a file that the job has, with something in it that nobody knows
    [[ $1 && ! -e $1 ]] || return 0
    [[ $1 != */* ]] || /.sandbox/real/mkdir -p -- "${1%/*}/"
    echo "$SANDBOX_UNKNOWN" >"$1"
}
__sandbox_files() { # command: what it reads, the folders it writes to, a program by its path are there in the job
    local __sandbox_path __sandbox_text=" $1 "
    if [[ ${SANDBOX_FILES-} = 1 && $1 =~ ^\[?\[\ (!\ )?-([fdesrwxL])\ ([^\ ]+)\ \]\]?$ ]]; then
        __sandbox_path=$(__sandbox_path "${BASH_REMATCH[3]}")
        [[ ${BASH_REMATCH[2]} != d || ! $__sandbox_path ]] || /.sandbox/real/mkdir -p -- "$__sandbox_path"
        __sandbox_put "$__sandbox_path"
        return 0
    fi
    while [[ $__sandbox_text =~ [\<\>]\ ?([^\<\>\&\ ]+)\ (.*) ]]; do
        __sandbox_text=" ${BASH_REMATCH[2]}"
        __sandbox_put "$(__sandbox_path "${BASH_REMATCH[1]}")"
    done
    __sandbox_text=$1
    while [[ $__sandbox_text =~ ^[A-Za-z_][A-Za-z0-9_]*=[^\ ]*\ (.*) ]]; do __sandbox_text=${BASH_REMATCH[1]}; done
    __sandbox_path=${__sandbox_text%%\ *}
    [[ $__sandbox_path = [\"\$./~]* && $__sandbox_path != *=* ]] || return 0
    __sandbox_path=$(__sandbox_path "$__sandbox_path")
    [[ $__sandbox_path = */* && $__sandbox_path != /usr/bin/* && $__sandbox_path != *\ * && ! -e $__sandbox_path ]] || return 0
    /.sandbox/real/mkdir -p -- "${__sandbox_path%/*}" && /.sandbox/real/ln -s /.sandbox/stub "$__sandbox_path"
}
command_not_found_handle() { /.sandbox/stub "$@"; }
cd() { # the batch shell goes there
    if (($#)); then
        [[ ! ${__sandbox_top-} || $BASH_SUBSHELL != 0 ]] ||
            printf '%s\0' "$SANDBOX_LINE" cd "${@: -1}" >>/.sandbox/records/assigned 2>/dev/null || :
        [[ -d ${*: -1} || ${*: -1} = - ]] || /.sandbox/real/mkdir -p -- "${@: -1}" 2>/dev/null
    fi
    builtin "${__sandbox_to:-cd}" "$@"
}
pushd() { local __sandbox_to=pushd; cd "$@"; }
source() { /.sandbox/stub source "$@"; [[ ! -f ${1-} ]] || builtin source "$@"; }
.() { source "$@"; }
ulimit() { /.sandbox/stub ulimit "$@"; }
__sandbox_filter() { # what a filter prints of something that nobody knows is unknown, too
    local __sandbox_word __sandbox_in __sandbox_out __sandbox_unknown= __sandbox_piped=
    [[ ! -p /dev/stdin && ! -f /dev/stdin ]] || __sandbox_piped=1
    for __sandbox_word in "${@:2}"; do
        case $__sandbox_word in /proc/* | /sys/* | /etc/*) __sandbox_unknown=1 ;; esac
        [[ -f $__sandbox_word ]] || continue
        __sandbox_piped=
        [[ $(<"$__sandbox_word") != *"$SANDBOX_UNKNOWN"* ]] || __sandbox_unknown=1
    done
    if [[ $__sandbox_piped ]]; then
        __sandbox_in=$(command head -c 65536; printf x)
        [[ $__sandbox_in != *"$SANDBOX_UNKNOWN"* ]] || __sandbox_unknown=1
        __sandbox_out=$(printf %s "${__sandbox_in%x}" | command "$@"; printf x%s $?)
    else
        __sandbox_out=$(command "$@"; printf x%s $?)
    fi
    if [[ $__sandbox_unknown && $__sandbox_out != *"$SANDBOX_UNKNOWN"* && " $* " != " "*"grep -"*q* ]]; then
        echo "$SANDBOX_UNKNOWN"
    else
        printf %s "${__sandbox_out%x*}"
        return "${__sandbox_out##*x}"
    fi
}
__sandbox_filters="awk gawk mawk cat cut egrep fgrep grep head sed sort tac tail tr uniq wc sha1sum sha256sum md5sum cksum"
for __sandbox_name in $__sandbox_filters; do builtin eval "$__sandbox_name() { __sandbox_filter $__sandbox_name \"\$@\"; }"; done
unset __sandbox_name EPOCHSECONDS EPOCHREALTIME SECONDS SRANDOM
EPOCHSECONDS=$SANDBOX_NOW EPOCHREALTIME=$SANDBOX_NOW.5 SECONDS=$SANDBOX_UNKNOWN SRANDOM=$SANDBOX_UNKNOWN
[[ ${SANDBOX_LINE-} ]] || __sandbox_top=1 RANDOM=$SANDBOX_UNKNOWN # another one in each job, the same when asked again
__sandbox_names=()
trap '__sandbox_seen "$LINENO" "$BASH_COMMAND" || :' DEBUG # nothing in it ends a script that has set -e
