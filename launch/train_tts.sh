#!/usr/bin/env bash
# Train Higgs-Audio V2 on one node or many; arguments go to train_v2_ddp.py.
#
#   sbatch launch/train_tts.sh --train_data_file train.json --output_dir out ...   2 nodes x 8 GPUs; or sbatch --nodes=1
#   bash launch/train_tts.sh --train_data_file train.json --output_dir out ...     this machine, all its GPUs
#
# DRY_RUN=1 prints the command and ends. Slurm's warning before the time limit, SIGTERM and Ctrl-C let the trainers
# finish their step and save; after the warning the job is queued again. A second Ctrl-C ends everything at once.
#
#SBATCH --job-name=train_tts
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=%x-%j.out
set -euo pipefail
LAUNCHER=train_tts

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ ! -e "$repo/launch/env.sh" ]; then         # sbatch runs a copy from its spool folder; Slurm knows the original
    repo=$(scontrol show job "${SLURM_JOB_ID:-0}" | sed -n 's|^ *Command=\(.*\)/launch/[a-z0-9_]*\.sh.*|\1|p')
    repo=$(cd "${SLURM_SUBMIT_DIR:-.}" && cd "$repo" && pwd)
fi
REPO=${REPO:-$repo}                             # this repository
[ -e "$REPO/launch/env.sh" ] ||
    { echo "train_tts: error: no launch/env.sh in '$REPO': set REPO to the repository's folder" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$REPO/launch/env.sh"

TRAINER=${TRAINER:-$REPO/train_v2_ddp.py}       # the script that torchrun starts
VENV=${VENV:-}                                  # a virtual environment to activate
CONDA_ENV=${CONDA_ENV:-}                        # a conda environment; default tts_env where there is one, else the PATH
NPROC_PER_NODE=${NPROC_PER_NODE:-}              # trainers a node; default: one a GPU
PORT_BASE=${PORT_BASE:-29500}                   # to which job id % 1000 is added; below 32768 the kernel takes no ports
MASTER_PORT=${MASTER_PORT:-}                    # rendezvous port on the first node, instead of that sum
MAX_RESTARTS=${MAX_RESTARTS:-0}                 # torchrun's own restarts; 0: Slurm starts anew, on nodes that work
MAX_REQUEUES=${MAX_REQUEUES:-100}               # starts over which a job may go on queueing itself
REQUEUE_ON_FAILURE=${REQUEUE_ON_FAILURE:-node}  # node: when a node was lost; any: after any failure; never
SRUN_WAIT=${SRUN_WAIT:-60}                      # seconds after one node's end until a silent one is given up
LOG_DIR=${LOG_DIR:-}                            # every node's own log; default OUTPUT_DIR/node_logs
DRY_RUN=${DRY_RUN:-0}                           # 1: check, print the command, end

OUTPUT_DIR=$(flag_value --output_dir ./output "$@")
LOG_DIR=${LOG_DIR:-$OUTPUT_DIR/node_logs}
MARKER=$OUTPUT_DIR/requeue                      # left by trainers that saved because they were asked to stop
job=${SLURM_JOB_ID:-} restart=${SLURM_RESTART_COUNT:-0}
PROGRESS=$LOG_DIR/$job.progress                 # newest checkpoint when the job last queued itself for a lost node
if [ -n "${SLURM_STEP_ID:-}" ]; then job=''; fi # a shell in a job step (srun --pty bash): srun would wait for its end

# -- environment -------------------------------------------------------------------------------------------------------

if [ -n "$VENV" ]; then
    need_file "$VENV/bin/activate" VENV
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
elif command -v conda >/dev/null && conda env list | grep -q "^${CONDA_ENV:-tts_env} "; then
    set +u              # conda's scripts read variables that may be unset
    eval "$(conda shell.bash hook)"
    conda activate "${CONDA_ENV:-tts_env}"
    set -u
elif [ -n "$CONDA_ENV" ]; then
    die "CONDA_ENV=$CONDA_ENV: no such conda environment"
fi

# -- checks ------------------------------------------------------------------------------------------------------------

command -v torchrun >/dev/null || die "no torchrun on PATH: set VENV or CONDA_ENV"
need_file "$TRAINER" TRAINER
for flag in --train_data_file --train_data_dir --eval_data_file --eval_data_dir; do
    path=$(flag_value $flag "" "$@")
    if [ -n "$path" ]; then need_file "$path" $flag; fi
done

gpus=$(count_gpus)
if [ -z "$NPROC_PER_NODE" ]; then
    [ "$gpus" -ge "${SLURM_GPUS_ON_NODE:-0}" ] ||
        die "Slurm gave $SLURM_GPUS_ON_NODE GPUs on $HOSTNAME, the driver shows $gpus; NPROC_PER_NODE=1 trains without"
    NPROC_PER_NODE=$((gpus > 0 ? gpus : 1))
elif [ "$gpus" -gt 0 ] && [ "$NPROC_PER_NODE" -gt "$gpus" ]; then
    die "NPROC_PER_NODE=$NPROC_PER_NODE, but $HOSTNAME has $gpus GPUs"
fi
if [ "$gpus" = 0 ]; then
    say "no GPU on $HOSTNAME: trainers run on CPUs, $NPROC_PER_NODE a node (NPROC_PER_NODE)"
else
    export NEED_GPUS=$NPROC_PER_NODE            # on every node
fi
threads=$(($(count_cpus) / NPROC_PER_NODE))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}       # a trainer's share of the CPUs

dry_run() { printf '%q ' "OMP_NUM_THREADS=$OMP_NUM_THREADS" "${command[@]}"; echo; exit; }

# -- this machine ------------------------------------------------------------------------------------------------------

if [ -z "$job" ]; then
    command=(bash "$REPO/launch/node.sh" ""
        torchrun --standalone --nproc-per-node="$NPROC_PER_NODE" --max-restarts="$MAX_RESTARTS" "$TRAINER" "$@")
    if [ "$DRY_RUN" = 1 ]; then dry_run; fi
    exec "${command[@]}"
fi

# -- Slurm -------------------------------------------------------------------------------------------------------------

nodes=$SLURM_JOB_NUM_NODES
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)      # head could end scontrol, and with it us
port=${MASTER_PORT:-$((PORT_BASE + job % 1000))}
# srun no longer inherits --cpus-per-task. --kill-on-bad-exit: a node's failure ends the others. --wait: srun would wait
# for ever for a node that died and came back before Slurm noticed.
command=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpus-per-task="$(count_cpus)" --export=ALL
    --input=none --kill-on-bad-exit=1 --wait="$SRUN_WAIT" bash "$REPO/launch/node.sh" "$LOG_DIR/$job"
    torchrun --nnodes="$nodes" --nproc-per-node="$NPROC_PER_NODE" --max-restarts="$MAX_RESTARTS"
    --rdzv-backend=c10d --rdzv-id="$job.$restart" --rdzv-endpoint="$first:$port" "$TRAINER" "$@")
if [ "$DRY_RUN" = 1 ]; then dry_run; fi
need_free_port "$port"
mkdir -p "$LOG_DIR"
rm -f "$MARKER"
if [ "$restart" = 0 ]; then rm -f "$PROGRESS"; fi   # another cluster's job of the same number
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$LOG_DIR/$job-flight-}    # and the rank, when one hangs
say "job $job, start $((restart + 1)), on $SLURM_JOB_NODELIST: $nodes x $NPROC_PER_NODE trainers," \
    "$OMP_NUM_THREADS threads each; rendezvous $first:$port; node logs $LOG_DIR/$job-*.log"

# shellcheck disable=SC2329     # supervise calls both
ask_srun() { kill -USR1 "$1"; }      # srun passes it on to every task
# shellcheck disable=SC2329
end_srun() { kill -TERM "$1"; }      # srun ends the step
status=0
supervise ask_srun end_srun "${command[@]}" || status=$?

# A node that was lost never told Slurm that its part has ended, so the step is still there after srun; or it starts
# nothing any more. The exit status does not tell: trainers that lose a peer fail as after any error. When Slurm itself
# finds the node missing, before --wait is over, it queues the job again on its own.
node_lost() {
    for _ in {1..10}; do
        if ! squeue --noheader --steps --jobs="$job" --format=%i | grep -qE '\.[0-9]+$'; then
            timeout 60 srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --input=none true && return 1
            return 0
        fi
        sleep 1
    done
    return 0        # the step is still there
}

# Both signs may also come of an error that repeats: processes that end slowly, a probe that waits too long. So the job
# goes on only if there is a newer checkpoint than at its last such requeue: two starts from one checkpoint, not 100.
progressed() {
    local noted newest
    noted=$(cat "$PROGRESS" 2>/dev/null) || noted=-1        # the first such requeue
    newest=$(find "$OUTPUT_DIR" -maxdepth 1 | sed -n 's|.*/checkpoint-\([0-9]*\)$|\1|p' | sort -n | tail -n 1)
    [ "${newest:-0}" -gt "$noted" ] && echo "${newest:-0}" >"$PROGRESS"
}

lost='a node was lost' why=''
if [ -e "$MARKER" ]; then
    why=$(cat "$MARKER")
elif [ $status != 0 ] && [ "$REQUEUE_ON_FAILURE" = any ]; then
    why="failed with status $status"
elif [ $status != 0 ] && [ "$REQUEUE_ON_FAILURE" = node ] && node_lost; then
    why=$lost
fi
[ -n "$why" ] || exit $status
state=$(scontrol show job "$job" | sed -n 's/^ *JobState=\([A-Z_]*\).*/\1/p')
[ "$state" = RUNNING ] || { say "$why; the job is $state"; exit $status; }  # scancel, or Slurm requeues it
[ "$restart" -lt "$MAX_REQUEUES" ] || die "$why; not queued again, this was start $((restart + 1)) (MAX_REQUEUES)"
[ "$why" != "$lost" ] || progressed || die "$why, and no new checkpoint since the last time; not queued again"
say "$why; the job is queued again"
scontrol requeue "$job" || die "could not be queued again; the same sbatch command goes on from the newest checkpoint"
