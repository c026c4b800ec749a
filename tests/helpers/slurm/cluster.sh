#!/usr/bin/env bash
# A real Slurm of two nodes on one machine, for tests: slurmctld, a slurmd per node and munge, as root, without systemd.
#
#   cluster.sh start DIR       returns when all nodes are idle; export SLURM_CONF=DIR/slurm.conf to talk to it
#   cluster.sh kill DIR NODE   a crash: slurmd, its step daemons and every task of n1 or n2 die at once
#   cluster.sh up DIR NODE     the node is back
#   cluster.sh stop DIR        ends the cluster and all that runs on it; logs stay in DIR/log; safe to repeat
#
# Jobs, signals, time limits, requeues and node failures are Slurm's own; GPUs are fake, CPUs and memory only declared.
set -euo pipefail

MODE=${MODE:-auto}           # netns: nodes differ in address, host name and ports; local: in the port only
CPUS=${CPUS:-128}            # a node has, on paper
GPUS=${GPUS:-8}              # a node has, on paper
MEMORY=${MEMORY:-1000000}    # MB a node has, on paper
DOWN_AFTER=${DOWN_AFTER:-20} # seconds of silence until a node is called down (Slurm's default: 300)

NODES=(n1 n2)
BRIDGE=ftbr0 NET=10.78.0     # one cluster at a time on a machine: these names and all ports are fixed
say() { echo "cluster.sh: $*" >&2; }
die() { say "$*"; exit 1; }
[ $# -ge 2 ] || { sed -n '4,7s/^# *//p' "$0" >&2; exit 2; }
mkdir -p "$2"
DIR=$(cd "$2" && pwd)
export SLURM_CONF=$DIR/slurm.conf

number() { echo "${1#n}"; }
netns() { echo "ft-$1"; }

netns_allowed() {
    ip netns add ft-probe 2>/dev/null && ip netns exec ft-probe true 2>/dev/null
    local status=$?
    ip netns del ft-probe 2>/dev/null || true
    return $status
}

configure() {
    local host controller node at g
    host=$(hostname -s)
    controller=$NET.1
    if [ "$MODE" = local ]; then controller=127.0.0.1; fi
    cat <<END
ClusterName=flat
SlurmctldHost=$host($controller)
SlurmctldPort=18817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job starts again when its old credential has expired (default: 120 s)
AuthInfo=socket=$DIR/munge/socket,cred_expire=5
StateSaveLocation=$DIR/state
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdSpoolDir=$DIR/spool/%n
SlurmdPidFile=$DIR/slurmd.%n.pid
SlurmdLogFile=$DIR/log/slurmd.%n.log
# trust the values below; nothing is bound, limited or accounted
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=2
GresTypes=gpu
JobRequeue=1
# a node that comes back is used again
ReturnToService=2
SlurmdTimeout=$DOWN_AFTER
KillWait=5
# shorter than the requeue delay, or a late kill meant for a lost node hits the job's next start
MessageTimeout=4
PropagateResourceLimitsExcept=ALL
END
    for node in "${NODES[@]}"; do
        at="NodeHostname=$node NodeAddr=$NET.$((10 + $(number "$node"))) Port=18818"
        if [ "$MODE" = local ]; then at="NodeHostname=$host NodeAddr=127.0.0.1 Port=$((18820 + $(number "$node")))"; fi
        echo "NodeName=$node $at CPUs=$CPUS Boards=1 SocketsPerBoard=2 CoresPerSocket=$((CPUS / 2)) ThreadsPerCore=1" \
            "RealMemory=$MEMORY Gres=gpu:$GPUS State=UNKNOWN"
    done
    echo "PartitionName=gpu Nodes=n[1-${#NODES[@]}] Default=YES MaxTime=INFINITE State=UP"
    # each GPU needs a separate device file, or Slurm calls the node invalid: copies of /dev/null
    for ((g = 0; g < GPUS; g++)); do mknod "$DIR/dev/nvidia$g" c 1 3; done
    echo "NodeName=n[1-${#NODES[@]}] Name=gpu File=$DIR/dev/nvidia[0-$((GPUS - 1))]" >"$DIR/gres.conf"
    echo "CgroupPlugin=cgroup/v1" >"$DIR/cgroup.conf"     # unused; v2 would ask systemd
}

network() {
    local node other
    if [ "$MODE" = local ]; then
        for node in "${NODES[@]}"; do echo "127.0.0.1 $node #flat-slurm" >>/etc/hosts; done
        return
    fi
    ip link add $BRIDGE type bridge
    ip addr add $NET.1/24 dev $BRIDGE
    ip link set $BRIDGE up
    for node in "${NODES[@]}"; do
        ip netns add "$(netns "$node")"
        ip link add "ft$node" type veth peer name eth0 netns "$(netns "$node")"
        ip link set "ft$node" master $BRIDGE up
        ip -n "$(netns "$node")" addr add "$NET.$((10 + $(number "$node")))/24" dev eth0
        ip -n "$(netns "$node")" link set eth0 up
        ip -n "$(netns "$node")" link set lo up
        mkdir -p "/etc/netns/$(netns "$node")"      # `ip netns exec` lays these files over those of /etc
        echo "hosts: files" >"/etc/netns/$(netns "$node")/nsswitch.conf"
        { echo "127.0.0.1 localhost"; echo "$NET.1 $(hostname -s)"
          for other in "${NODES[@]}"; do echo "$NET.$((10 + $(number "$other"))) $other"; done
        } >"/etc/netns/$(netns "$node")/hosts"
    done
}

remove_network() {
    local node kept
    for node in "${NODES[@]}"; do
        if ip netns list 2>/dev/null | grep -q "^$(netns "$node")\b"; then ip netns del "$(netns "$node")"; fi
        ip link del "ft$node" 2>/dev/null || true
        rm -rf "/etc/netns/$(netns "$node")"
    done
    ip link del $BRIDGE 2>/dev/null || true
    if kept=$(grep -v '#flat-slurm$' /etc/hosts) && grep -q '#flat-slurm$' /etc/hosts; then
        echo "$kept" >/etc/hosts        # in place: containers mount this file
    fi
}

# Process ids of a node: daemons hold its log open, tasks carry its name and this cluster's configuration.
processes() {
    { find /proc/[0-9]*/fd -lname "$DIR/log/slurmd.$1.log" 2>/dev/null || true
      grep -lszxF "SLURMD_NODENAME=$1" /proc/[0-9]*/environ | xargs -r grep -lszxF "SLURM_CONF=$SLURM_CONF" || true
    } | cut -d/ -f3 | sort -u
}

kill_node() {
    local pids
    for _ in 1 2 3 4 5; do      # again, for what was being started meanwhile
        pids=$(processes "$1")
        [ -n "$pids" ] || break
        # shellcheck disable=SC2086
        kill -KILL $pids 2>/dev/null || true
    done
    rm -f "$DIR/slurmd.$1.pid"
}

up() {
    if [ "$(cat "$DIR/mode")" = local ]; then
        slurmd -N "$1"
    else
        # shellcheck disable=SC2016
        ip netns exec "$(netns "$1")" unshare --uts bash -c 'hostname "$1" && exec slurmd -N "$1"' - "$1"
    fi </dev/null >>"$DIR/log/boot.log" 2>&1      # a daemon that kept our pipes would keep the caller waiting
}

end_daemon() {      # end_daemon PID_FILE NAME
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    for ((i = 0; i < 60; i++)); do
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$2" ] || return 0
        if [ $i = 0 ]; then kill "$pid"; elif [ $i = 50 ]; then kill -KILL "$pid"; fi
        sleep 0.1
    done
}

stop() {
    end_daemon "$DIR/slurmctld.pid" slurmctld       # first, so that it reacts to nothing that follows
    local node
    for node in "${NODES[@]}"; do kill_node "$node"; done
    end_daemon "$DIR/munge/pid" munged
    remove_network
}

start() {
    local tool node
    [ "$(id -u)" = 0 ] || die "needs root"
    for tool in slurmctld slurmd munged sinfo ip; do
        command -v $tool >/dev/null || die "$tool is missing: apt-get install slurm-wlm munge iproute2"
    done
    [ ${#DIR} -le 70 ] || die "$DIR is too long for Unix sockets: at most 70 characters"
    if ip link show $BRIDGE >/dev/null 2>&1 || grep -q '#flat-slurm$' /etc/hosts; then
        die "another cluster of these tests runs, or was not stopped; cluster.sh stop ITS_DIR"
    fi
    if [ "$MODE" = auto ]; then
        MODE=netns
        netns_allowed || { MODE=local; say "no network namespaces here: the nodes share one address"; }
    fi
    trap 'say "did not start; end of the logs:"; tail -qn 3 "$DIR"/log/* >&2; stop' EXIT
    mkdir -p "$DIR"/{state,log,dev,munge,spool}
    chmod 755 "$DIR"
    echo "$MODE" >"$DIR/mode"
    (umask 077 && head -c 1024 /dev/urandom >"$DIR/munge/key")
    munged --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" --pid-file="$DIR/munge/pid" --force \
        --log-file="$DIR/munge/log" --seed-file="$DIR/munge/seed" </dev/null >>"$DIR/log/boot.log" 2>&1
    configure >"$SLURM_CONF"
    network
    slurmctld -f "$SLURM_CONF" </dev/null >>"$DIR/log/boot.log" 2>&1
    for node in "${NODES[@]}"; do up "$node"; done
    for ((i = 0; i < 3000; i++)); do
        if [ "$(timeout 3 sinfo -hN -rt idle -o %N 2>/dev/null | wc -l)" = ${#NODES[@]} ]; then trap - EXIT; return; fi
        sleep 0.1
    done
    exit 1
}

case $1 in
start) start ;;
stop) stop ;;
kill) kill_node "$3" ;;
up) up "$3" ;;
*) die "no command $1" ;;
esac
