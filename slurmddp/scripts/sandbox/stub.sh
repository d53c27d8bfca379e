#!/bin/bash
# Stands for every program in the sandbox: it records how it was started, answers as in a job, and starts the words
# behind it as srun, a container or timeout would.
trap - DEBUG
set +eufT
unset -f cd source . pushd ulimit command_not_found_handle ${__sandbox_filters-}
__name=${0##*/}
__whole=${0#/usr/bin/}
if [[ $0 = /.sandbox/stub ]]; then __whole=${1-} __name=${1##*/}; shift; fi

__streams=()
for __fd in 0 1 2; do __streams+=("$(/.sandbox/real/readlink "/proc/$$/fd/$__fd")"); done

record() {
    # words, folder, standard input, output and error, environment
    {
        printf '%s\0' "$#" "$@" "$(pwd -P)" "${__streams[@]}"
        cat "/proc/$$/environ"
    } >"/.sandbox/records/$$" 2>/dev/null
}
unknown() { # what it prints; a search for a free port finds another one in each task
    local __found=$SANDBOX_UNKNOWN __procid=${SANDBOX_TASK#*:}
    case "$__name $*" in
        ss\ * | lsof\ * | netstat\ * | uuidgen\ * | openssl\ * | *socket* | *free*port*) [[ $__procid ]] && __found=$((__found + 1 + ${__procid%%:*})) ;;
    esac
    if [[ ${__streams[1]} = pipe:* ]]; then
        echo "$__found"
        [[ $SANDBOX_FILES = 1 || $__name != @(ls|find) ]] || echo "$__found.2" # nor how many files there are
    fi
}
expand_hosts() {
    local __part __list=$1 __first __last
    if [[ -z $__list || $__list = "$SLURM_JOB_NODELIST" ]]; then printf '%s\n' $SANDBOX_HOSTS; return; fi
    while [[ $__list ]]; do
        if [[ $__list =~ ^([^,\[]*)\[([0-9,-]+)\](,|$)(.*) ]]; then
            local __stem=${BASH_REMATCH[1]} __ranges=${BASH_REMATCH[2]} __rest=${BASH_REMATCH[4]}
            for __part in ${__ranges//,/ }; do
                __first=${__part%-*} __last=${__part#*-}
                for ((__n = 10#$__first; __n <= 10#$__last; __n++)); do printf "%s%0${#__first}d\n" "$__stem" "$__n"; done
            done
            __list=$__rest
        else
            echo "${__list%%,*}"
            [[ $__list = *,* ]] && __list=${__list#*,} || __list=
        fi
    done
}
address() { # of a node: 10.0.0.N
    local __n=1 __host
    for __host in $SANDBOX_HOSTS; do [[ $__host = "$1" ]] && break; __n=$((__n + 1)); done
    echo "10.0.0.$__n"
}
run_in_task() { # procid localid nodeid words...
    local __host=$1 __procid=$2 __localid=$3 __nodeid=$4
    shift 4
    export SLURM_PROCID=$__procid SLURM_LOCALID=$__localid SLURM_NODEID=$__nodeid SLURM_STEP_ID=0 SLURM_STEPID=0
    export SLURMD_NODENAME=$__host HOSTNAME=$__host SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_TASK_PID=$((4000 + __procid))
    export SLURM_GTIDS=$__procid SLURM_SRUN_COMM_HOST=10.0.0.1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1
    SANDBOX_TASK="$$:$__procid:$__nodeid" start "$@"
}
start() { # what bash or a wrapper would start; a path that is not there is recorded, too
    if [[ $1 = */* && ! -x $1 ]] || ! type -P -- "$1" >/dev/null; then /.sandbox/stub "$@"; else command "$@"; fi
}
takes_value() { # whether an option of srun is followed by its value
    case $1 in
        --*=*) return 1 ;;
        --*) [[ "@FLAGS@" != *" ${1#--} "* ]] ;;
        -[luKEIXZOsQvHVhk]*) return 1 ;;
        -?) return 0 ;;
        *) return 1 ;;
    esac
}
srun() {
    local __nodes= __ntasks= __tpn= __list= __export= __relative=0 __word __value __hosts __picked=() __per __count __procid __node
    while [[ ${1-} = -* ]]; do
        __word=$1 __value=
        shift
        [[ $__word = -- ]] && break
        case $__word in --*=*) __value=${__word#*=} __word=${__word%%=*} ;; esac
        if [[ -z $__value ]] && takes_value "$__word"; then __value=${1-}; shift; fi
        if [[ $__word != --* && ${#__word} -gt 2 ]]; then __value=${__word:2} __word=${__word:0:2} __value=${__value#=}; fi
        case $__word in
            -N | --nodes) __nodes=${__value%%-*} ;; -n | --ntasks) __ntasks=$__value ;; -w | --nodelist) __list=$__value ;;
            --ntasks-per-node | --tasks-per-node) __tpn=$__value ;; --export) __export=$__value ;; -r | --relative) __relative=$__value ;;
        esac
    done
    [[ ${1-} ]] || return 0
    __hosts=($SANDBOX_HOSTS)
    [[ $__list ]] && __hosts=($(expand_hosts "$__list"))
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
        __node=$((__procid / __per))
        (run_in_task "${__hosts[__node]:-${__hosts[0]}}" "$__procid" $((__procid % __per)) "$__node" "$@")
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
                    case $__word in PATH | HOME | USER | LOGNAME | SHELL | LANG | TMPDIR | *ENV_* | SLURM* | SANDBOX_* | BASH_ENV) ;; *) unset "$__word" 2>/dev/null ;; esac
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
            -* | *=* | [0-9]* | run | profile) ;;
            *) if [[ $1 = */* || $1 = *.py ]] || type -P -- "$1" >/dev/null; then start "$@"; return; fi ;;
        esac
        shift
    done
}
case $__name in
    sleep | wait | true | echo) exit 0 ;;
    date) exec /.sandbox/real/date -d "@$SANDBOX_NOW" "$@" ;;
    hostname)
        case "$*" in *-i* | *-I* | *--all-ip* | *--ip*) __ip=$(address "$HOSTNAME"); echo "${__ip/10.0./10.9.}" ;; *) echo "$HOSTNAME" ;; esac
        exit 0 ;;
    whoami) echo "$USER"; exit 0 ;;
    ls | stat) unknown "$@"; exit 0 ;;
    readlink)
        case " $* " in *" -"[fme]" "*) exec /.sandbox/real/readlink "$@" ;; *) unknown "$@" ;; esac
        exit 0 ;;
    scontrol)
        case "$*" in
            *show\ hostname*) expand_hosts "${3-}" ;;
            *show\ job*) printf 'JobId=%s JobName=%s\n   Command=%s\n   WorkDir=%s\n   NodeList=%s\n' "$SLURM_JOB_ID" \
                "$SLURM_JOB_NAME" "$SANDBOX_SCRIPT" "$SLURM_SUBMIT_DIR" "$SLURM_JOB_NODELIST" ;;
            *getaddrs*) for __host in $SANDBOX_HOSTS; do echo "$__host: $(address "$__host"):6818"; done ;;
            *) record "$__whole" "$@" ;;
        esac
        exit 0 ;;
    nvidia-smi)
        for ((__gpu = 0; __gpu < SANDBOX_GPUS; __gpu++)); do
            case "$*" in *-L* | *--list*) echo "GPU $__gpu: GPU (UUID: GPU-$__gpu)" ;; *--query-gpu=index*) echo "$__gpu" ;; *) echo "$SANDBOX_UNKNOWN" ;; esac
        done
        exit 0 ;;
esac
record "$__whole" "$@"
case $__name in
    chmod | cp | ln | mkdir | mv | rm | touch) exec "/.sandbox/real/$__name" "$@" ;;
    srun) srun "$@" ;;
    apptainer | singularity) case ${1-} in exec | run | shell) container "$@" ;; esac ;;
    nohup | setsid) # whose options have no values
        while [[ ${1-} = -* ]]; do shift; done
        [[ ! ${1-} ]] || start "$@" ;;
    timeout | nice | ionice | numactl | taskset | stdbuf | time | uv | conda | mamba | micromamba | poetry | pixi | nsys | ncu | strace | shifter | docker | podman | enroot)
        case $__name:${1-} in
            conda:info) echo /.conda ;;
            conda:run | mamba:run | micromamba:run | uv:run | poetry:run | pixi:run | nsys:profile | docker:run | podman:run | enroot:start) behind "$@" ;;
            conda:* | mamba:* | micromamba:* | uv:* | poetry:* | pixi:* | nsys:* | docker:* | podman:* | enroot:*) ;;
            *) behind "$@" ;;
        esac ;;
    mpirun | mpiexec | torchrun | accelerate | deepspeed | ray | sbatch) ;;
    python*) unknown "$@" ;;
    *) unknown "$@" ;;
esac
exit 0
