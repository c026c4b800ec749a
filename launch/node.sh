#!/usr/bin/env bash
# One node's part of a launch: node.sh LOG torchrun ...; slurm.sh calls it once on every node.
# The node's own copy of the output goes to LOG-NODE.log; "" keeps none.
trap '' USR1                # first of all: nothing here may die of a request to stop
set -euo pipefail
LAUNCHER=${SLURMD_NODENAME:-$HOSTNAME}
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"

log=$1 copy=''
shift
if [ -n "$log" ]; then
    exec > >(trap '' USR1 TERM HUP INT; exec tee -a "$log-$LAUNCHER.log") 2>&1
    copy=$!
fi
[ "$(count_gpus)" -ge "${NEED_GPUS:-0}" ] ||
    die "$HOSTNAME has $(count_gpus) GPUs, $NEED_GPUS are needed"

# Trainers are torchrun's children. It gets no signal itself: it would kill them 30 s later, saved
# or not. That is what it does when this shell is killed: `tied` sends it SIGTERM.
# shellcheck disable=SC2046
ask_trainers() { kill -USR1 $(children "$1"); }
mark=LAUNCH_ID=$HOSTNAME-$$     # torchrun puts trainers into other sessions
end_marked() { kill_marked "$mark"; }
status=0
supervise ask_trainers end_marked "${tied[@]}" env "$mark" "$@" || status=$?
end_marked
if [ -n "$copy" ]; then exec >&- 2>&-; wait "$copy" || true; fi
exit $status
