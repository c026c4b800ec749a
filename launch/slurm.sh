#!/usr/bin/env bash
# Run a trainer on this machine, or on all nodes of the Slurm job we are in. Arguments go to it. The
# launchers end in this one; TRAINER=mine.py bash launch/slurm.sh ... runs another script.
#
# DRY_RUN=1 checks the flags and prints the commands. SIGTERM, Ctrl-C and Slurm's warning before the
# time limit let trainers finish their step and save; after the warning the job is requeued.
# Partition and account are sbatch's own: SBATCH_PARTITION=gpu SBATCH_ACCOUNT=me sbatch ...; a
# container: SRUN_ARGS="--container-image=/images/torch.sqsh --container-mounts=/data"
set -euo pipefail
LAUNCHER=${LAUNCHER:-slurm}                     # what messages begin with
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
TRAINER=${TRAINER:-}                            # the script that torchrun starts
AFTER=${AFTER:-}                                # lines of bash that run once, here, after training
MIN_GPUS=${MIN_GPUS:-1}                         # GPUs this node must have; 0: train on CPUs as well
NPROC_PER_NODE=${NPROC_PER_NODE:-}              # trainers a node; default: one a GPU
MASTER_PORT=${MASTER_PORT:-}                    # the first node's; default 29500 + job id % 1000
MAX_RESTARTS=${MAX_RESTARTS:-0}                 # torchrun's own; 0: Slurm restarts, on other nodes
MAX_REQUEUES=${MAX_REQUEUES:-100}               # how often a job may requeue itself
REQUEUE_ON_FAILURE=${REQUEUE_ON_FAILURE:-node}  # node: a node was lost; any: any failure; never
SRUN_ARGS=${SRUN_ARGS:-}                        # further arguments of srun
SRUN_WAIT=${SRUN_WAIT:-60}                      # seconds after a node's end until others are killed
LOG_DIR=${LOG_DIR:-}                            # nodes' logs; in a job default OUTPUT_DIR/node_logs
DRY_RUN=${DRY_RUN:-0}                           # 1: check, print the commands, end
export -n LAUNCHER TRAINER AFTER                # launchers that AFTER calls set them
OUTPUT_DIR=$(flag_value --output_dir ./output "$@")
MARKER=$OUTPUT_DIR/requeue                      # left by trainers that were asked to stop and saved
job=${SLURM_JOB_ID:-} restart=${SLURM_RESTART_COUNT:-0} nodes=1
if [ -n "${SLURM_STEP_ID:-}" ]; then job=''; fi # srun --pty bash: our srun would wait for its end
if [ -n "$job$AFTER" ]; then LOG_DIR=${LOG_DIR:-$OUTPUT_DIR/node_logs}; fi
PROGRESS=$LOG_DIR/$job.progress                 # newest checkpoint at the last requeue

# -- checks ----------------------------------------------------------------------------------------
use_environment torchrun torch transformers
need_file "$TRAINER" TRAINER
gpus=$(count_gpus)
[ "$gpus" -ge "$MIN_GPUS" ] || [ "$DRY_RUN" = 1 ] ||
    die "$HOSTNAME has $gpus GPUs, $MIN_GPUS are needed (MIN_GPUS=0 trains on CPUs)"
[ -n "$NPROC_PER_NODE" ] || [ "$gpus" -ge "${SLURM_GPUS_ON_NODE:-0}" ] || die "Slurm gave" \
    "$SLURM_GPUS_ON_NODE GPUs on $HOSTNAME, the driver shows $gpus; NPROC_PER_NODE=1 trains without"
NPROC_PER_NODE=${NPROC_PER_NODE:-$((gpus > 0 ? gpus : 1))}
if [ "$gpus" = 0 ]; then
    say "no GPU on $HOSTNAME: trainers run on CPUs, $NPROC_PER_NODE a node (NPROC_PER_NODE)"
else
    export NEED_GPUS=$NPROC_PER_NODE            # on every node
    python -c 'import sys; from torch import version as v; sys.exit(not v.cuda and not v.hip)' ||
        die "$HOSTNAME has $gpus GPUs, but torch of $(command -v python) is built without CUDA:" \
            "set VENV or CONDA_ENV; CUDA_VISIBLE_DEVICES= trains on CPUs"
fi
threads=$(($(count_cpus) / NPROC_PER_NODE))     # a trainer's share of the CPUs
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

# -- the command -----------------------------------------------------------------------------------
node=(bash "$REPO/launch/node.sh" "${LOG_DIR:+$LOG_DIR/${job:-local}}" torchrun)
port=$MASTER_PORT                               # without it, a free port: jobs may share a node
if [ -z "$job" ]; then
    command=("${node[@]}" "${one_machine[@]}")
else
    nodes=$SLURM_JOB_NUM_NODES
    # srun no longer inherits --cpus-per-task. --kill-on-bad-exit: a node's failure ends the others.
    # --wait: srun would wait for ever for a node that died and came back before Slurm noticed.
    on_nodes=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --input=none)
    read -ra more <<<"$SRUN_ARGS"
    command=("${on_nodes[@]}" --cpus-per-task="$(count_cpus)" --export=ALL --kill-on-bad-exit=1
        --wait="$SRUN_WAIT" "${more[@]}" "${node[@]}")
    if [ "$nodes$MASTER_PORT" = 1 ]; then command+=("${one_machine[@]}"); else
        port=${MASTER_PORT:-$((29500 + job % 1000))}
        master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)     # head may end it
        command+=(--nnodes="$nodes" --rdzv-backend=c10d --rdzv-id="$job.$restart"
            --rdzv-endpoint="$master:$port")
    fi
fi
command+=(--nproc-per-node="$NPROC_PER_NODE" --max-restarts="$MAX_RESTARTS" "$TRAINER" "$@")

if [ "$DRY_RUN" = 1 ]; then
    if grep -q 'cli\.parse(' "$TRAINER"; then   # one of this repository's scripts
        CHECK_FLAGS=1 WORLD_SIZE=$((nodes * NPROC_PER_NODE)) LOCAL_WORLD_SIZE=$NPROC_PER_NODE \
            python "$TRAINER" "$@" >&2 || exit $?
    fi
    shown "OMP_NUM_THREADS=$OMP_NUM_THREADS" "${command[@]}"
    printf '\n%s' "${AFTER:+$AFTER$'\n'}"
    exit
fi

# -- training --------------------------------------------------------------------------------------
if [ -n "$port" ] && (exec 3<>"/dev/tcp/localhost/$port") 2>/dev/null; then
    die "port $port on $HOSTNAME is in use; set MASTER_PORT to another one"
fi
if [ -n "$LOG_DIR" ]; then mkdir -p "$LOG_DIR" || die "cannot make $LOG_DIR"; fi
rm -f "$MARKER"
if [ -z "$job$AFTER" ]; then exec "${command[@]}"; fi       # node.sh does the rest
if [ -n "$job" ]; then
    if [ "$restart" = 0 ]; then rm -f "$PROGRESS"; fi       # another cluster's job of this number
    export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$LOG_DIR/$job-flight-}    # of a hang
    say "job $job, start $((restart + 1)), on $SLURM_JOB_NODELIST: $nodes x $NPROC_PER_NODE" \
        "trainers; ${port:+port $port; }node logs $LOG_DIR/$job-*.log"
else
    command=("${tied[@]}" "${command[@]}")      # Slurm ends the step of a killed launcher
fi

# srun passes USR1 on to every task, and ends the step on TERM. node.sh, once it catches TERM (bit
# 14), has its trainers save on TERM, and ends them on INT.
ask() {
    if [ -n "$job" ]; then kill -USR1 "$1"; return; fi
    ! ((16#$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status") & 1 << 14)) || kill -TERM "$1"
}
end() { if [ -n "$job" ]; then kill -TERM "$1"; else kill -INT "$1"; fi; }
status=0 lost='a node was lost'
supervise ask end "${command[@]}" || status=$?

# -- what comes next -------------------------------------------------------------------------------
# A lost node leaves its step listed after srun, or starts nothing any more. The exit status does
# not show it: trainers that lose a peer fail as after any error.
node_lost() {
    for _ in {1..10}; do
        if ! squeue --noheader --steps --jobs="$job" --format=%i | grep -qE '\.[0-9]+$'; then
            if timeout 60 "${on_nodes[@]}" true; then return 1; else return 0; fi
        fi
        sleep 1
    done
}

# An error that repeats may cause both. So the job is requeued only if there is a newer checkpoint
# than at its last such requeue.
progressed() {
    local newest noted
    noted=$(cat "$PROGRESS" 2>/dev/null) || noted=-1        # the first such requeue
    newest=$(find "$OUTPUT_DIR" -maxdepth 1 | grep -oP '/checkpoint-\K\d+$' | sort -n | tail -n1) ||
        newest=0
    [ "$newest" -gt "$noted" ] && echo "$newest" >"$PROGRESS"
}

requeue() {         # REASON; does not return
    local state
    [ -n "$job" ] || exit $status
    state=$(scontrol show job "$job" | sed -n 's/^ *JobState=\([A-Z_]*\).*/\1/p')
    [ "$state" = RUNNING ] || { say "$1; the job is $state"; exit $status; }    # scancel, requeue
    [ "$restart" -lt "$MAX_REQUEUES" ] ||
        die "$1; not requeued, this was start $((restart + 1)) (MAX_REQUEUES)"
    [ "$1" != "$lost" ] || progressed ||
        die "$1, and no new checkpoint since the last time; not requeued"
    say "$1; requeueing the job"
    scontrol requeue "$job" || die "requeueing failed; rerun the same sbatch command to resume"
    exit 0
}

if [ -e "$MARKER" ]; then requeue "$(cat "$MARKER")"; fi
if [ $status != 0 ]; then
    if [ "$REQUEUE_ON_FAILURE" = any ]; then requeue "failed with status $status"; fi
    if [ "$REQUEUE_ON_FAILURE" = node ] && [ -n "$job" ] && node_lost; then requeue "$lost"; fi
    exit $status
fi
[ -n "$AFTER" ] || exit 0
[ -z "$asked" ] || requeue "asked to stop by SIG$asked when training was over"

trap - TERM HUP INT     # USR1 stays ignored until AFTER is supervised
end_after() { kill -TERM -- "-$1"; }
# shellcheck disable=SC2016     # the inner shells expand them
supervise end_after end_after bash -o pipefail -c 'bash -euo pipefail -c "$1" 2>&1 | tee -a "$0"' \
    "$LOG_DIR/${job:-local}-after.log" "$AFTER" || status=$?
[ $status = 0 ] || [ "$asked" != USR1 ] || requeue "asked to stop by SIGUSR1 after training"
exit $status
