#!/usr/bin/env bash
# Starts, stops or shows one Ray cluster over several machines by ssh. The first host is the head.
#   HOSTS="node1 node2 node3" launch/ray_cluster.sh start
#   HOSTS="node1 node2 node3" launch/ray_cluster.sh status
#   HOSTS="node1 node2 node3" launch/ray_cluster.sh stop     # ends every Ray process of this user's on these hosts
# DRY_RUN=1 prints the commands for each host and runs none: type them by hand where there is no ssh between the nodes.
# Then, on the head: RAY_ADDRESS=auto launch/run_qwen_7b.sh
set -euo pipefail

HOSTS=${HOSTS:-$(hostname)}           # names or addresses, the head first; all must reach each other under them
HEAD_ADDRESS=${HEAD_ADDRESS:-}        # address of the head that the others join; the first of HOSTS when empty
PORT=${PORT:-6379}
DASHBOARD_HOST=${DASHBOARD_HOST:-127.0.0.1}  # the dashboard (and job submission) has no password: keep it on the head
DASHBOARD_PORT=${DASHBOARD_PORT:-8265}
GPUS=${GPUS:-}                        # per node; found by Ray when empty
CPUS=${CPUS:-}                        # per node; found by Ray when empty
RAY=${RAY:-ray}                       # path of the ray command on all hosts
SSH=${SSH:-ssh -o BatchMode=yes -o ConnectTimeout=10}
RAY_OPTIONS=${RAY_OPTIONS:-}          # more words for `ray start`, e.g. --object-store-memory=100000000000
DRY_RUN=${DRY_RUN:-0}

read -r -a hosts <<<"$HOSTS"
head=${hosts[0]}
address=${HEAD_ADDRESS:-$head}

# on HOST COMMAND: by ssh, or here when it is this machine's own name.
on() {
    local host=$1 command=$2
    if [ "$DRY_RUN" = 1 ]; then
        printf '%s: %s\n' "$host" "$command"
    elif [ "$host" = localhost ] || [ "$host" = "$(hostname)" ]; then
        bash -c "$command"
    else
        $SSH "$host" "$command"
    fi
}

resources="${GPUS:+ --num-gpus=$GPUS}${CPUS:+ --num-cpus=$CPUS}${RAY_OPTIONS:+ $RAY_OPTIONS}"
settings="RAY_USAGE_STATS_ENABLED=0"

start() {
    on "$head" "$settings $RAY start --head --node-ip-address=$address --port=$PORT --dashboard-host=$DASHBOARD_HOST --dashboard-port=$DASHBOARD_PORT$resources"
    local host
    for host in "${hosts[@]:1}"; do
        on "$host" "$settings $RAY start --address=$address:$PORT$resources"
    done
}

stop() { # workers first: a head that is gone leaves them waiting for it
    local host i failed=0
    for ((i = ${#hosts[@]} - 1; i >= 0; i--)); do
        host=${hosts[i]}
        on "$host" "$RAY stop --grace-period=30" || { echo "ray_cluster: could not stop Ray on $host" >&2; failed=1; }
    done
    return $failed
}

status() {
    on "$head" "$RAY status --address=$address:$PORT"
}

case "${1:-}" in
start | stop | status) "$1" ;;
*)
    echo "usage: HOSTS=\"head worker ...\" $0 start|stop|status" >&2
    exit 2
    ;;
esac
