#!/usr/bin/env bash
# Train BD3-LM block diffusion on GSM8K on one H200, then answer the test problems. Arguments go to diffusion/train_bd3lm.py,
# after those from here.
#
#   sbatch launch/train_gsm8k_bd3lm_h200.sh                          one GPU, data and tokenizer from the hub
#   TRAIN_DATA=train.jsonl TEST_DATA=test.jsonl TOKENIZER=gpt2_files bash launch/train_gsm8k_bd3lm_h200.sh      offline
#   PRESET=aggressive sbatch launch/train_gsm8k_bd3lm_h200.sh --strip_calculator
#   bash launch/train_gsm8k_bd3lm_h200.sh --demo                     small, on problems it makes itself; no GPU needed
#
# DRY_RUN=1 prints the commands and ends. Slurm's warning before the time limit, SIGTERM and Ctrl-C let the trainer
# finish its step and save; after the warning the job is queued again, also when it comes while problems are answered:
# they are answered anew. A second Ctrl-C ends everything at once.
#
#SBATCH --job-name=train_gsm8k_bd3lm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=18
#SBATCH --mem=64G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300
#SBATCH --output=%x-%j.out
set -euo pipefail
LAUNCHER=${LAUNCHER:-train_gsm8k_bd3lm_h200}

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ ! -e "$repo/launch/env.sh" ]; then         # sbatch runs a copy from its spool folder; Slurm knows the original
    repo=$(scontrol show job "${SLURM_JOB_ID:-0}" | sed -n 's|^ *Command=\(.*\)/launch/[a-z0-9_]*\.sh.*|\1|p')
    repo=$(cd "${SLURM_SUBMIT_DIR:-.}" && cd "$repo" && pwd)
fi
REPO=${REPO:-$repo}                             # this repository
[ -e "$REPO/launch/env.sh" ] || { echo "$LAUNCHER: error: no launch/env.sh in '$REPO'; set REPO" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$REPO/launch/env.sh"

SYSTEM=${SYSTEM:-gsm8k}                         # gsm8k or hdp; train_hdp_diffusion_h200.sh sets hdp
PRESET=${PRESET:-recommended}                   # or conservative, aggressive, extreme: problems, rate, steps
TRAIN_DATA=${TRAIN_DATA-openai/gsm8k}           # JSONL, JSON, dataset folder or hub name
TEST_DATA=${TEST_DATA-openai/gsm8k}             # the same with a test split, answered after training; empty: not done
TOKENIZER=${TOKENIZER:-gpt2}                    # folder with GPT-2's files or tokenizer.json, or hub name
OUTPUT_DIR=${OUTPUT_DIR:-}                      # checkpoints, logs, answers; default outputs/SYSTEM_h200, or _demo
SIZE=${SIZE:-small}                             # model: nano, tiny, small, medium
BLOCK_SIZE=${BLOCK_SIZE:-16}                    # tokens of a block
GPUS=${GPUS:-1}                                 # trainers; each takes the preset's problems, so a step grows
MIN_GPUS=${MIN_GPUS:-1}                         # GPUs that must be there; 0 lets a dry run or a trial start anywhere
switches='--bf16 --tf32 --compile --pack --drop_too_long'
SWITCHES=${SWITCHES-$switches}                  # flags without a value; SWITCHES= gives none of them
SAMPLE_FLAGS=${SAMPLE_FLAGS---bf16 --drop_too_long}     # flags of diffusion/sample_bd3lm.py
TRAINER=${TRAINER:-$REPO/diffusion/train_bd3lm.py}        # the script that torchrun starts
VENV=${VENV:-}                                  # a virtual environment to activate
LOG_DIR=${LOG_DIR:-}                            # where the output is kept, over requeues; default OUTPUT_DIR/node_logs
MAX_REQUEUES=${MAX_REQUEUES:-100}               # starts over which a job may go on queueing itself
DRY_RUN=${DRY_RUN:-0}                           # 1: check, print the commands, end
cpus=$(count_cpus)
WORKERS=${WORKERS:-$((cpus > 16 ? 16 : cpus > 1 ? cpus - 1 : 1))}       # loader processes a trainer

demo=0
for argument in "$@"; do
    case $argument in --demo | --demo=*) demo=1 ;; esac
done
OUTPUT_DIR=${OUTPUT_DIR:-outputs/${SYSTEM}_$([ $demo = 1 ] && echo demo || echo h200)}
OUTPUT_DIR=$(flag_value --output_dir "$OUTPUT_DIR" "$@")
LOG_DIR=${LOG_DIR:-$OUTPUT_DIR/node_logs}
MARKER=$OUTPUT_DIR/requeue                      # left by a trainer that saved because it was asked to stop
job=${SLURM_JOB_ID:-} restart=${SLURM_RESTART_COUNT:-0}
if [ -n "${SLURM_STEP_ID:-}" ]; then job=''; fi # a shell in a job step (srun --pty bash): it is not ours to requeue

# -- checks ------------------------------------------------------------------------------------------------------------

if [ -n "$VENV" ]; then
    need_file "$VENV/bin/activate" VENV
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
fi
command -v torchrun >/dev/null || die "no torchrun on PATH: set VENV"
need_file "$TRAINER" TRAINER
case $SYSTEM in
gsm8k) test_file=test.jsonl ;;
hdp) test_file=test_hdp.json ;;
*) die "SYSTEM=$SYSTEM: gsm8k or hdp" ;;
esac
case $PRESET in
conservative | recommended | aggressive | extreme) ;;
*) die "PRESET=$PRESET: conservative, recommended, aggressive or extreme" ;;
esac
gpus=$(count_gpus)
[ "$gpus" = 0 ] || [ "$GPUS" -le "$gpus" ] || die "GPUS=$GPUS, but $HOSTNAME has $gpus"
if [ $demo = 0 ]; then
    [ "$gpus" -ge "$MIN_GPUS" ] || die "$HOSTNAME has $gpus GPUs, $MIN_GPUS are needed (MIN_GPUS); --demo needs none"
    [ -n "$TRAIN_DATA" ] || die "TRAIN_DATA is not set: a file of training problems"
fi

# -- commands ----------------------------------------------------------------------------------------------------------

if [ $demo = 1 ]; then      # everything small, so that two CPU cores show falling bounds and an accuracy in minutes
    settings=(--model_size nano --dropout 0 --block_size 8 --max_length 96 --question_budget 48 --plan_budget 32
        --execution_budget 48 --row_length 128 --per_device_train_batch_size 8 --gradient_accumulation_steps 1
        --learning_rate 2e-3 --warmup_steps 100 --max_steps 2400 --ema_decay 0.99 --eval_steps 400 --save_steps 0
        --logging_steps 200 --strip_calculator --num_workers 1 --report_to none
        --attn_backend sdpa)    # for under 128 noisy copies a row torch may compile flex without a backward pass
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}    # on busy cores more threads make small steps many times slower
    TEST_DATA=$OUTPUT_DIR/demo/$test_file
    SAMPLE_FLAGS='--order confidence'
else
    read -ra switches <<<"$SWITCHES"
    settings=(--batch_preset "$PRESET" --train_data "$TRAIN_DATA" --tokenizer "$TOKENIZER" --model_size "$SIZE"
        --block_size "$BLOCK_SIZE" --num_workers "$WORKERS" "${switches[@]}")
fi
read -ra sample_flags <<<"$SAMPLE_FLAGS"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cpus / GPUS > 0 ? cpus / GPUS : 1))}
train=(bash "$REPO/launch/node.sh" "$LOG_DIR/${job:-local}" torchrun --standalone --nproc-per-node="$GPUS"
    "$TRAINER" --system "$SYSTEM" "${settings[@]}" --output_dir "$OUTPUT_DIR" "$@")
sample=(python "$REPO/diffusion/sample_bd3lm.py" --checkpoint "$OUTPUT_DIR" --test_file "$TEST_DATA" "${sample_flags[@]}")

if [ "$DRY_RUN" = 1 ]; then
    printf '%q ' "OMP_NUM_THREADS=$OMP_NUM_THREADS" "${train[@]}"
    echo
    if [ -n "$TEST_DATA" ]; then
        printf '%q ' "${sample[@]}"
        echo
    fi
    exit
fi

# -- training ----------------------------------------------------------------------------------------------------------

mkdir -p "$LOG_DIR" || die "$LOG_DIR cannot be made"
rm -f "$MARKER"
say "${job:+job $job, start $((restart + 1)), }preset $([ $demo = 1 ] && echo demo || echo "$PRESET")," \
    "$GPUS trainer(s), $gpus GPU(s); log $LOG_DIR/${job:-local}-*.log"

# shellcheck disable=SC2329     # supervise calls both
ask_node() {        # node.sh passes it on to the trainers, once it catches TERM, bit 14 (USR1 it was started without)
    if ((16#$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status") & 1 << 14)); then kill -TERM "$1"; fi
}
# shellcheck disable=SC2329
end_node() { kill -INT "$1"; }      # node.sh, asked before, ends them
status=0
supervise ask_node end_node "${train[@]}" || status=$?
trap - TERM HUP INT         # USR1 stays ignored until the answers are supervised

queue_again() {     # REASON; does not return
    local state
    if [ -z "$job" ]; then exit $status; fi
    state=$(scontrol show job "$job" | sed -n 's/^ *JobState=\([A-Z_]*\).*/\1/p')
    [ "$state" = RUNNING ] || { say "$1; the job is $state"; exit $status; }      # scancel
    [ "$restart" -lt "$MAX_REQUEUES" ] || die "$1; not queued again, this was start $((restart + 1)) (MAX_REQUEUES)"
    say "$1; the job is queued again"
    scontrol requeue "$job" || die "could not be queued again; the same sbatch command goes on from the checkpoint"
    exit 0
}
if [ -e "$MARKER" ]; then queue_again "$(cat "$MARKER")"; fi
[ $status = 0 ] || exit $status

# -- accuracy ----------------------------------------------------------------------------------------------------------

case " $* " in *" --dry_run "*) exit ;; esac        # the trainer's own dry run leaves no checkpoint
if [ $demo = 1 ]; then python "$REPO/common/report.py" "$OUTPUT_DIR" --check_fell; fi      # status 1 unless the loss fell
if [ -z "$TEST_DATA" ]; then
    say "no TEST_DATA, so no accuracy"
    exit
fi
# shellcheck disable=SC2329     # supervise calls it
end_answers() { kill -TERM -- "-$1"; }
# shellcheck disable=SC2016     # the inner shell expands them
supervise end_answers end_answers bash -o pipefail -c '"$@" 2>&1 | tee -a "$0"' \
    "$LOG_DIR/${job:-local}-sample.log" "${sample[@]}" || status=$?
[ $status = 0 ] || [ "$asked" != USR1 ] || queue_again "asked to stop by SIGUSR1 while problems were answered"
exit $status
