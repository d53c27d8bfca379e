# Read by bash before the script (BASH_ENV). SANDBOX_FILES=1: a file that the script tests for is there; 0: it is not.
case $0 in /usr/bin/*) return ;; esac
set -T
__sandbox_path() { # a path as the script wrote it, expanded; nothing that would run a command
    [[ $1 = *[\`\;\&\|\<\>\(\)]* ]] || builtin eval "printf '%s' $1" 2>/dev/null
}
__sandbox_assigned() { # command: what the assignments before it have left, and which are in it
    local name text=" $1"
    for name in "${__sandbox_names[@]}"; do
        printf '%s\0' "$SANDBOX_LINE" "$name" "${!name-}"
    done >>/.sandbox/records/assigned
    __sandbox_names=()
    [[ $text =~ ^\ ((export|declare|local|readonly|typeset)\ |[A-Za-z_][A-Za-z0-9_]*\+?=) ]] || return 0
    while [[ $text =~ \ ([A-Za-z_][A-Za-z0-9_]*)\+?=(.*) ]]; do
        __sandbox_names+=("${BASH_REMATCH[1]}") text=${BASH_REMATCH[2]}
    done
}
__sandbox_seen() {
    case ${FUNCNAME[1]-} in cd | pushd | source | . | __sandbox_*) return 0 ;; esac
    if [[ ${__sandbox_top-} ]]; then # a line of the script, not of a text for bash -c
        ((BASH_SUBSHELL)) || __sandbox_assigned "$2" 2>/dev/null
        export SANDBOX_LINE=$1
    fi
    local path text=" $2 "
    if [[ ${SANDBOX_FILES-} = 1 && $2 =~ ^\[?\[\ (!\ )?-([fdesrwxL])\ ([^\ ]+)\ \]\]?$ ]]; then
        local kind=${BASH_REMATCH[2]}
        path=$(__sandbox_path "${BASH_REMATCH[3]}")
        if [[ $path && ! -e $path && $kind = d ]]; then
            mkdir -p -- "$path"
        elif [[ $path && ! -e $path ]]; then
            mkdir -p -- "./${path%"${path##*/}"}" "${path%"${path##*/}"}"
            echo "$SANDBOX_UNKNOWN" >"$path"
        fi
        return 0
    fi 2>/dev/null
    # What it reads, the folders it writes to, and a program by its path: they are there in the job.
    while [[ $text =~ [\<\>]\ ?([^\<\>\&\ ]+)\ (.*) ]]; do
        text=" ${BASH_REMATCH[2]}"
        path=$(__sandbox_path "${BASH_REMATCH[1]}")
        if [[ $path && ! -e $path ]]; then
            [[ $path = */* ]] && mkdir -p -- "${path%/*}"
            echo "$SANDBOX_UNKNOWN" >"$path"
        fi
    done 2>/dev/null
    text=$2
    while [[ $text =~ ^[A-Za-z_][A-Za-z0-9_]*=[^\ ]*\ (.*) ]]; do text=${BASH_REMATCH[1]}; done
    path=${text%%\ *}
    if [[ $path = [\"\$./~]* && $path != *=* ]]; then
        path=$(__sandbox_path "$path")
        if [[ $path = */* && $path != /usr/bin/* && $path != *\ * && ! -e $path ]]; then
            mkdir -p -- "${path%/*}" && ln -s /.sandbox/stub "$path"
        fi
    fi 2>/dev/null
    return 0
}
command_not_found_handle() { /.sandbox/stub "$@"; }
__sandbox_cd() { # the batch shell goes there
    [[ ! ${__sandbox_top-} || $BASH_SUBSHELL != 0 ]] ||
        printf '%s\0' "$SANDBOX_LINE" cd "${@: -1}" >>/.sandbox/records/assigned 2>/dev/null || :
}
cd() {
    __sandbox_cd "$@"
    builtin cd "$@" 2>/dev/null && return
    mkdir -p -- "${@: -1}" 2>/dev/null && builtin cd "$@"
}
pushd() { __sandbox_cd "$@"; mkdir -p -- "${@: -1}" 2>/dev/null; builtin pushd "$@"; }
source() {
    if [[ -f ${1-} ]]; then builtin source "$@"; else /.sandbox/stub source "$@"; fi
}
.() { source "$@"; }
ulimit() { /.sandbox/stub ulimit "$@"; }
[[ ${SANDBOX_LINE-} ]] || __sandbox_top=1
__sandbox_names=()
trap '__sandbox_seen "$LINENO" "$BASH_COMMAND" || :' DEBUG # nothing in it ends a script that has set -e
