#!/bin/bash
# Stands for every program in the sandbox: it records how it was started, answers as in a job, and starts the words
# behind it as srun, a container or timeout would.
trap - DEBUG
set +eufT
unset -f cd source . pushd ulimit command_not_found_handle
name=${0##*/}
whole=${0#/usr/bin/}
if [[ $0 = /.sandbox/stub ]]; then whole=${1-} name=${1##*/}; shift; fi

streams=("$(readlink "/proc/$$/fd/0")" "$(readlink "/proc/$$/fd/1")" "$(readlink "/proc/$$/fd/2")")

record() {
    # words, folder, standard input, output and error, environment
    {
        printf '%s\0' "$#" "$@" "$(pwd -P)" "${streams[@]}"
        cat "/proc/$$/environ"
    } >"/.sandbox/records/$$" 2>/dev/null
}
unknown() { if [[ ${streams[1]} = pipe:* ]]; then echo "$SANDBOX_UNKNOWN"; fi; }
expand_hosts() {
    local part list=$1 first last
    if [[ -z $list || $list = "$SLURM_JOB_NODELIST" ]]; then printf '%s\n' $SANDBOX_HOSTS; return; fi
    while [[ $list ]]; do
        if [[ $list =~ ^([^,\[]*)\[([0-9,-]+)\](,|$)(.*) ]]; then
            local stem=${BASH_REMATCH[1]} ranges=${BASH_REMATCH[2]} rest=${BASH_REMATCH[4]}
            for part in ${ranges//,/ }; do
                first=${part%-*} last=${part#*-}
                for ((n = 10#$first; n <= 10#$last; n++)); do printf "%s%0${#first}d\n" "$stem" "$n"; done
            done
            list=$rest
        else
            echo "${list%%,*}"
            [[ $list = *,* ]] && list=${list#*,} || list=
        fi
    done
}
address() { # of a node: 10.0.0.N
    local n=1 host
    for host in $SANDBOX_HOSTS; do [[ $host = "$1" ]] && break; n=$((n + 1)); done
    echo "10.0.0.$n"
}
run_in_task() { # procid localid nodeid words...
    local host=$1 procid=$2 localid=$3 nodeid=$4
    shift 4
    export SLURM_PROCID=$procid SLURM_LOCALID=$localid SLURM_NODEID=$nodeid SLURM_STEP_ID=0 SLURM_STEPID=0
    export SLURMD_NODENAME=$host HOSTNAME=$host SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST SLURM_TASK_PID=$((4000 + procid))
    export SLURM_GTIDS=$procid SLURM_SRUN_COMM_HOST=10.0.0.1 SLURM_LAUNCH_NODE_IPADDR=10.0.0.1
    SANDBOX_TASK="$$:$procid:$nodeid" start "$@"
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
    local nodes= ntasks= tpn= list= export= relative=0 word value hosts picked=() per count procid node
    while [[ ${1-} = -* ]]; do
        word=$1 value=
        shift
        [[ $word = -- ]] && break
        case $word in --*=*) value=${word#*=} word=${word%%=*} ;; esac
        if [[ -z $value ]] && takes_value "$word"; then value=${1-}; shift; fi
        if [[ $word != --* && ${#word} -gt 2 ]]; then value=${word:2} word=${word:0:2} value=${value#=}; fi
        case $word in
            -N | --nodes) nodes=${value%%-*} ;; -n | --ntasks) ntasks=$value ;; -w | --nodelist) list=$value ;;
            --ntasks-per-node | --tasks-per-node) tpn=$value ;; --export) export=$value ;; -r | --relative) relative=$value ;;
        esac
    done
    [[ ${1-} ]] || return 0
    hosts=($SANDBOX_HOSTS)
    [[ $list ]] && hosts=($(expand_hosts "$list"))
    hosts=("${hosts[@]:$((relative + 0))}")
    [[ $nodes =~ ^[0-9]+$ ]] || nodes=${#hosts[@]}
    if ! [[ $ntasks =~ ^[0-9]+$ ]]; then
        if [[ $tpn =~ ^[0-9]+$ ]]; then ntasks=$((nodes * tpn))
        elif [[ ${SLURM_NTASKS-} =~ ^[0-9]+$ && $nodes = "$SLURM_JOB_NUM_NODES" ]]; then ntasks=$SLURM_NTASKS
        else ntasks=$((nodes * ${SANDBOX_TPN:-1})); fi
    fi
    ((ntasks > 0)) || ntasks=1
    ((nodes > ntasks)) && nodes=$ntasks
    ((nodes > 0)) || nodes=1
    per=$(((ntasks + nodes - 1) / nodes))
    export SLURM_NTASKS=$ntasks SLURM_NPROCS=$ntasks SLURM_STEP_NUM_NODES=$nodes SLURM_STEP_NUM_TASKS=$ntasks
    export SLURM_NNODES=$nodes SLURM_STEP_TASKS_PER_NODE=$per
    [[ $export && $export != ALL* && $export != NONE ]] && export SANDBOX_DROPPED=1
    for word in ${export//,/ }; do [[ $word = *=* ]] && export "${word?}"; done
    count=" "
    for procid in 0 1 $per $((ntasks - 1)); do
        ((procid < ntasks)) && [[ $count != *" $procid "* ]] || continue
        count+="$procid "
        node=$((procid / per))
        (run_in_task "${hosts[node]:-${hosts[0]}}" "$procid" $((procid % per)) "$node" "$@")
    done
}
container() { # the words behind the image
    shift
    while [[ ${1-} = -* ]]; do
        case $1 in *=*) ;; @CONTAINER@) shift ;; esac
        shift
    done
    shift
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
case $name in
    sleep | wait | true | echo) exit 0 ;;
    date) exec /.sandbox/real/date -d "@$SANDBOX_NOW" "$@" ;;
    hostname)
        case "$*" in *-i* | *-I* | *--all-ip* | *--ip*) address "$HOSTNAME" ;; *) echo "$HOSTNAME" ;; esac
        exit 0 ;;
    whoami) echo "$USER"; exit 0 ;;
    scontrol)
        case "$*" in
            *show\ hostname*) expand_hosts "${3-}" ;;
            *show\ job*) printf 'JobId=%s JobName=%s\n   Command=%s\n   WorkDir=%s\n   NodeList=%s\n' "$SLURM_JOB_ID" \
                "$SLURM_JOB_NAME" "$SLURM_SUBMIT_DIR/$SANDBOX_SCRIPT" "$SLURM_SUBMIT_DIR" "$SLURM_JOB_NODELIST" ;;
            *getaddrs*) for host in $SANDBOX_HOSTS; do echo "$host: $(address "$host"):6818"; done ;;
            *) record "$whole" "$@" ;;
        esac
        exit 0 ;;
    nvidia-smi)
        for ((gpu = 0; gpu < SANDBOX_GPUS; gpu++)); do
            case "$*" in *-L* | *--list*) echo "GPU $gpu: GPU (UUID: GPU-$gpu)" ;; *--query*) echo "$gpu" ;; esac
        done
        exit 0 ;;
esac
record "$whole" "$@"
case $name in
    srun) srun "$@" ;;
    apptainer | singularity) case ${1-} in exec | run | shell) container "$@" ;; esac ;;
    timeout | nohup | nice | ionice | numactl | taskset | stdbuf | setsid | time | uv | conda | mamba | micromamba | poetry | pixi | nsys | ncu | strace)
        case $name:${1-} in
            conda:info) echo /.conda ;;
            conda:run | mamba:run | micromamba:run | uv:run | poetry:run | pixi:run | nsys:profile) behind "$@" ;;
            conda:* | mamba:* | micromamba:* | uv:* | poetry:* | pixi:* | nsys:*) ;;
            *) behind "$@" ;;
        esac ;;
    mpirun | mpiexec | torchrun | accelerate | deepspeed | ray | sbatch) ;;
    python*) unknown ;;
    *) unknown ;;
esac
exit 0
