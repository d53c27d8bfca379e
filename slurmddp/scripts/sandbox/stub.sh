#!/bin/bash
# Stands for every program in the sandbox: it records how it was started, answers as in a job, and starts the words
# behind it as srun, a container or timeout would.
trap - DEBUG
set +eufT
unset -f cd source . pushd ulimit command_not_found_handle ${__sandbox_filters-}
__name=${0##*/} __whole=${0#/usr/bin/}
if [[ $0 = /.sandbox/stub ]]; then __whole=${1-} __name=${1##*/}; shift; fi

# What stands behind standard input, output and error; then the folder, whose name may have several lines.
__links=() __streams=()
for __fd in 0 1 2; do
    [[ -L /proc/$$/fd/$__fd ]] && __links+=("/proc/$$/fd/$__fd") || __links+=(/.sandbox/closed)
done
__folder=$(/.sandbox/real/readlink "${__links[@]}" "/proc/$$/cwd")
for __fd in 0 1 2; do __streams+=("${__folder%%$'\n'*}") __folder=${__folder#*$'\n'}; done

record() {
    # words, folder, standard input, output and error, environment
    local __environment
    mapfile -d '' -t __environment <"/proc/$$/environ"
    printf '%s\0' "$#" "$@" "$__folder" "${__streams[@]}" "${__environment[@]}" >"/.sandbox/records/$$" 2>/dev/null
}
unknown() { # what it prints; a search for a free port finds another one in each task
    local __found=$SANDBOX_UNKNOWN __procid=${SANDBOX_TASK#*:}
    if [[ $__procid && "$__name $*" = @(@(ss|lsof|netstat|uuidgen|openssl)\ *|*socket*|*free*port*) ]]; then
        __found=$((__found + 1 + ${__procid%%:*}))
    fi
    if [[ ${__streams[1]} = pipe:* ]]; then
        echo "$__found"
        [[ $SANDBOX_FILES = 1 || $__name != @(ls|find) ]] || echo "$__found.2" # nor how many files there are
    fi
}
expand_hosts() { # one name per line; a list that the job does not have, too
    local __list=${1:-${SLURM_JOB_NODELIST-${SANDBOX_HOSTS// /,}}} __part __first __n
    while [[ $__list ]]; do
        if [[ $__list =~ ^([^,\[]*)\[([0-9,-]+)\]([^,\[]*)(,(.*))?$ ]]; then
            for __part in ${BASH_REMATCH[2]//,/ }; do
                __first=${__part%-*}
                for ((__n = 10#$__first; __n <= 10#${__part#*-}; __n++)); do
                    printf "%s%0${#__first}d%s\n" "${BASH_REMATCH[1]}" "$__n" "${BASH_REMATCH[3]}"
                done
            done
            __list=${BASH_REMATCH[5]}
        else
            echo "${__list%%,*}"
            [[ $__list = *,* ]] && __list=${__list#*,} || __list=
        fi
    done
}
start() { # what bash or a wrapper would start; a path that is not there is recorded, too
    if [[ $1 = */* && ! -x $1 ]] || ! type -P -- "$1" >/dev/null; then /.sandbox/stub "$@"; else command "$@"; fi
}
srun() {
    local __nodes= __ntasks= __tpn= __list= __export= __relative=0 __word __hosts __per __count __procid __node
    while [[ ${1-} = -* && $1 != -- ]]; do
        __word=$1
        shift
        case $__word in
            --*=*) ;;
            -[!-]?*) __word="${__word:0:2}=${__word:2}" __word=${__word/==/=} ;;
            *) [[ "@FLAGS@" = *" $__word "* ]] || { __word+="=${1-}" && shift; } ;;
        esac
        case $__word in
            -N=* | --nodes=*) __nodes=${__word#*=} __nodes=${__nodes%%-*} ;; -n=* | --ntasks=*) __ntasks=${__word#*=} ;;
            --ntasks-per-node=* | --tasks-per-node=*) __tpn=${__word#*=} ;; -w=* | --nodelist=*) __list=${__word#*=} ;;
            -r=* | --relative=*) __relative=${__word#*=} ;; --export=*) __export=${__word#*=} ;;
        esac
    done
    [[ ${1-} != -- ]] || shift
    [[ ${1-} ]] || return 0
    __hosts=($SANDBOX_HOSTS)
    [[ ! $__list ]] || __hosts=($(expand_hosts "$__list"))
    __hosts=("${__hosts[@]:$((__relative + 0))}")
    [[ $__nodes =~ ^[0-9]+$ ]] || __nodes=${#__hosts[@]}
    if ! [[ $__ntasks =~ ^[0-9]+$ ]]; then
        if [[ $__tpn =~ ^[0-9]+$ ]]; then __ntasks=$((__nodes * __tpn))
        elif [[ ${SLURM_NTASKS-} =~ ^[0-9]+$ && $__nodes = "$SLURM_JOB_NUM_NODES" ]]; then __ntasks=$SLURM_NTASKS
        else __ntasks=$((__nodes * ${SANDBOX_TPN:-1})); fi
    fi
    ((__ntasks > 0)) || __ntasks=1
    ((__nodes > __ntasks)) && __nodes=$__ntasks
    ((__nodes > 0)) || __nodes=1
    __per=$(((__ntasks + __nodes - 1) / __nodes))
    export SLURM_NTASKS=$__ntasks SLURM_NPROCS=$__ntasks SLURM_STEP_NUM_NODES=$__nodes SLURM_STEP_NUM_TASKS=$__ntasks
    export SLURM_NNODES=$__nodes SLURM_STEP_TASKS_PER_NODE=$__per
    [[ $__export && $__export != ALL* && $__export != NONE ]] && export SANDBOX_DROPPED=1
    for __word in ${__export//,/ }; do [[ $__word = *=* ]] && export "${__word?}"; done
    __count=" "
    for __procid in 0 1 $__per $((__ntasks - 1)); do
        ((__procid < __ntasks)) && [[ $__count != *" $__procid "* ]] || continue
        __count+="$__procid "
        __node=$((__procid / __per)) HOSTNAME=${__hosts[__procid / __per]:-${__hosts[0]}}
        (
            export SLURM_PROCID=$__procid SLURM_GTIDS=$__procid SLURM_LOCALID=$((__procid % __per)) SLURM_NODEID=$__node
            export HOSTNAME SLURMD_NODENAME=$HOSTNAME SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_TASK_PID=$((4000 + __procid))
            export SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_SRUN_COMM_HOST=10.0.0.1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1
            SANDBOX_TASK="$$:$__procid:$__node:$((__procid % __per)):$__nodes:$__ntasks:$HOSTNAME" start "$@"
        )
    done
}
container() { # the words behind the image, with the variables that reach them
    local __word __given= __prefix=SINGULARITYENV_
    [[ $__name = singularity ]] || __prefix=APPTAINERENV_
    shift
    while [[ ${1-} = -* ]]; do
        case $1 in
            --cleanenv | --containall | --compat | --cleanenv=true | --containall=true | -[eC] | -[!-BHSWo]*[eC]*)
                for __word in $(compgen -e); do
                    case $__word in PATH | HOME | USER | LOGNAME | SHELL | LANG | TMPDIR | *ENV_* | SANDBOX_* | BASH_ENV) ;; *) unset "$__word" 2>/dev/null ;; esac
                done ;;
        esac
        case $1 in --env=*) __given=${1#*=} ;; *=*) ;; --env) __given=$2; shift ;; @CONTAINER@) shift ;; esac
        shift
    done
    shift
    for __word in $(compgen -e "$__prefix"); do
        export "${__word#"$__prefix"}=${!__word}"
        unset "$__word"
    done
    while [[ $__given =~ ^([A-Za-z_][A-Za-z0-9_]*=[^,]*),?(.*)$ ]]; do __given=${BASH_REMATCH[2]}; export "${BASH_REMATCH[1]?}"; done
    [[ ${1-} ]] && SANDBOX_CONTAINER=1 start "$@"
}
behind() { # the first word behind a wrapper that is a program
    while [[ ${1-} ]]; do
        case $1 in
            -o | --output | -V | --volume) shift ;; # of nsys, strace and shifter
            -* | *=* | [0-9]* | run | profile) ;;
            *) if [[ $1 = */* || $1 = *.py ]] || type -P -- "$1" >/dev/null; then start "$@"; return; fi ;;
        esac
        shift
    done
}
while IFS=$'\t' read -r __pattern __answer; do
    # shellcheck disable=SC2053 # a pattern
    [[ "$__name $*" != $__pattern ]] || { printf %b "$__answer"; exit 0; }
done </.sandbox/answers
case "$__name $*" in
    date\ *) exec /.sandbox/real/date -d "@$SANDBOX_NOW" "$@" ;;
    hostname\ *)
        __before=" $SANDBOX_HOSTS " __before=(${__before%% "$HOSTNAME" *}) # 10.9.0.N of the Nth node
        [[ "$*" = @(*-[iI]*|*--*ip*) ]] && echo "10.9.0.$((${#__before[@]} + 1))" || echo "$HOSTNAME"
        exit 0 ;;
    readlink\ *-[fme]\ *) exec /.sandbox/real/readlink "$@" ;;
    ls\ * | stat\ * | readlink\ *) unknown "$@"; exit 0 ;;
    scontrol\ *show\ hostname*) expand_hosts "${3-}"; exit 0 ;;
esac
record "$__whole" "$@"
shopt -s extglob
case "$__name ${1-}" in
    mkdir\ *) exec "/.sandbox/real/$__name" "$@" ;;
    @(chmod|cp|ln|mv|rm|touch)\ *) "/.sandbox/real/$__name" "$@" ;; # a file that is not here is in the job: no error of set -e
    srun\ *) srun "$@" ;;
    @(apptainer|singularity)\ @(exec|run|shell)) container "$@" ;;
    @(nohup|setsid)\ *) # whose options have no values
        while [[ ${1-} = -* ]]; do shift; done
        [[ ! ${1-} ]] || start "$@" ;;
    "conda info") echo /.conda ;;
    @(timeout|nice|ionice|numactl|taskset|stdbuf|time|ncu|strace|shifter)\ * | \
        @(conda|mamba|micromamba|uv|poetry|pixi|docker|podman)\ run | nsys\ profile | enroot\ start) behind "$@" ;;
    @(apptainer|singularity|conda|mamba|micromamba|uv|poetry|pixi|nsys|docker|podman|enroot)\ *) ;;
    @(mpirun|mpiexec|torchrun|accelerate|deepspeed|ray|sbatch|scontrol)\ *) ;;
    *) unknown "$@" ;;
esac
exit 0
