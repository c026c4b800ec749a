#!/usr/bin/env bash
# Train BD3-LM block diffusion on GSM8K on one H200, then answer the test problems. Arguments go to
# diffusion/train_bd3lm.py, after those from here; overrides as BD3-LM's own scripts take them
# (loader.num_workers=16) are turned into its flags.
#
#   sbatch launch/train_gsm8k_bd3lm_h200.sh             one GPU, data and tokenizer from the hub
#   TRAIN_DATA=train.jsonl TEST_DATA=test.jsonl TOKENIZER=gpt2_files bash launch/...    offline
#   PRESET=aggressive sbatch launch/train_gsm8k_bd3lm_h200.sh --strip_calculator
#   INIT_FROM=kuleshov-group/bd3lm-owt-block_size16 sbatch launch/...   published weights: better
#   bash launch/train_gsm8k_bd3lm_h200.sh --demo        small, on problems it makes itself; no GPU
#
# Everything else - DRY_RUN=1, signals, requeueing - is slurm.sh, which this one calls. A job whose
# time is over while problems are answered is queued again, too: they are answered anew.
#
#SBATCH --job-name=train_gsm8k_bd3lm --output=%x-%j.out --open-mode=append
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=18
#SBATCH --mem=64G --time=24:00:00 --requeue --signal=B:USR1@300
set -euo pipefail
export LAUNCHER=${LAUNCHER:-train_gsm8k_bd3lm_h200}

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(scontrol show job \
    "${SLURM_JOB_ID:-0}" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") || here=''
[ -e "$here/env.sh" ] || { echo "$LAUNCHER: error: there is no env.sh beside it" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$here/env.sh"

export TRAINER=${TRAINER:-$REPO/diffusion/train_bd3lm.py} # the script that torchrun starts
declare -A overrides=(          # as BD3-LM's own scripts take them
    [model.attn_backend]=--attn_backend
    [model.gradient_checkpointing]=--gradient_checkpointing
    [trainer.precision]=--bf16
    [trainer.compile]=--compile
    [trainer.max_steps]=--max_steps
    [loader.num_workers]=--num_workers
    [optim.lr]=--learning_rate
    [lr_scheduler.num_warmup_steps]=--warmup_steps
    [block_size]=--block_size
    [seed]=--seed)
translate "$@"
set -- "${arguments[@]}"
SAMPLER=${SAMPLER:-$REPO/diffusion/sample_bd3lm.py}       # the script that answers
SYSTEM=${SYSTEM:-gsm8k}                         # gsm8k or hdp; train_hdp_diffusion_h200.sh sets hdp
setting INIT_FROM '' --init_from  # weights to start from: hub name, folder, .ckpt; default: none
setting PRESET "$([ -n "$INIT_FROM" ] && echo finetune || echo recommended)"  # all: below
setting GLOBAL_BATCH_SIZE ''  # problems a step, of all GPUs; default: the preset's
setting BATCH_SIZE ''                           # problems a GPU and micro-step
setting GRAD_ACCUM ''                           # micro-steps a step
setting LR '' --learning_rate  # default: the preset's, by the root of the step
setting WARMUP_STEPS '' --warmup_steps          # default: the preset's, as that of the next
setting MAX_STEPS '' --max_steps                # optimizer steps
TRAIN_DATA=${TRAIN_DATA-openai/gsm8k}           # JSONL, JSON, dataset folder or hub name
TEST_DATA=${TEST_DATA-openai/gsm8k}  # the same, answered after training; empty: not
TOKENIZER=${TOKENIZER:-}  # folder with GPT-2's files or tokenizer.json, or hub name; default gpt2
OUTPUT_DIR=${OUTPUT_DIR:-}  # checkpoints, logs, answers; default outputs/SYSTEM_h200, or _demo
SIZE=${SIZE:-small}                             # model: nano, tiny, small, medium
BLOCK_SIZE=${BLOCK_SIZE:-16}                    # tokens of a block
GPUS=${GPUS:-1}                                 # trainers, which share the problems of a step
MIN_GPUS=${MIN_GPUS:-1}  # GPUs that must be there; 0 lets a dry run or a trial start anywhere
SWITCHES=${SWITCHES---bf16 --tf32 --compile --pack --drop_too_long --auto}  # SWITCHES= for none
SAMPLE_FLAGS=${SAMPLE_FLAGS---bf16 --drop_too_long}     # flags of the sampler
MIN_ACCURACY=${MIN_ACCURACY:-0.8}  # demo: share of new problems to answer right, else status 1
LOG_DIR=${LOG_DIR:-}  # where the output is kept, over requeues; default OUTPUT_DIR/node_logs
cpus=$(count_cpus)
WORKERS=${WORKERS:-$((cpus > 16 ? 16 : cpus > 1 ? cpus - 1 : 1))}       # loader processes a trainer

known+=(TRAIN_DATA TEST_DATA TOKENIZER OUTPUT_DIR SIZE BLOCK_SIZE GPUS SWITCHES SAMPLE_FLAGS WORKERS
    HDP_LAYOUT)
known_settings

demo=0 plan=0
for argument in "$@"; do
    case $argument in
    --demo | --demo=*) demo=1 ;;
    # the trainer's own dry run: no checkpoint, nothing to answer with
    --dry_run | --dry_run=*) plan=1 ;;
    esac
done
OUTPUT_DIR=${OUTPUT_DIR:-outputs/${SYSTEM}_$([ $demo = 1 ] && echo demo || echo h200)}
OUTPUT_DIR=$(flag_value --output_dir "$OUTPUT_DIR" "$@")

# -- checks ----------------------------------------------------------------------------------------

case $SYSTEM in
gsm8k) test_file=test.jsonl ;;
hdp) test_file=test_hdp.json ;;
*) die "SYSTEM=$SYSTEM: gsm8k or hdp" ;;
esac
# Problems a step = problems a GPU and micro-step x micro-steps x GPUs; what is not set follows.
each=4
# shellcheck disable=SC2153     # setting() made it
case $PRESET in
conservative) problems=64 ;;
recommended) problems=128 ;;
aggressive) problems=192 ;;
extreme) problems=256 ;;
source) problems=16 each=16 ;;
finetune) problems=64 each=2 ;;
convert) problems=64 each=1 ;;
*) die "PRESET=$PRESET: conservative, recommended, aggressive, extreme, source, finetune or" \
    "convert" ;;
esac
for name in GLOBAL_BATCH_SIZE BATCH_SIZE GRAD_ACCUM GPUS; do
    [[ -z ${!name} || ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name}: a number from 1 on"
done
preset=$((problems * each)) micro=$BATCH_SIZE steps=$GRAD_ACCUM
step=$preset auto=0  # the trainer splits a step into micro-steps, whatever the number of GPUs
if [ -n "$micro" ] && [ -n "$steps" ]; then step=$((micro * steps * GPUS)); fi
step=${GLOBAL_BATCH_SIZE:-$step}
read -ra words <<<"$SWITCHES"
if [ -z "$micro$steps" ] && has_flag --auto "${words[@]}"; then
    auto=1
else
    # the preset's micro-steps while each GPU has whole ones
    share=$((step / GPUS))
    if [ -z "$micro$steps" ]; then micro=$((share < problems ? share : problems)); fi
    micro=${micro:-$((share / steps))}
    steps=${steps:-$((micro > 0 ? share / micro : 0))}
    product=$((micro * steps * GPUS))
    [ "$product" = "$step" ] || die "$step problems a step cannot be shared out:" \
        "BATCH_SIZE x GRAD_ACCUM x GPUS = $product, of which any may be set"
fi

gpus=$(count_gpus)
[ "$gpus" = 0 ] || [ "$GPUS" -le "$gpus" ] || die "GPUS=$GPUS, but $HOSTNAME has $gpus"
if [ $demo = 0 ]; then
    [ "$gpus" -ge "$MIN_GPUS" ] || die "$HOSTNAME has $gpus GPUs," \
        "$MIN_GPUS are needed (MIN_GPUS); --demo needs none"
    [ -n "$TRAIN_DATA" ] || die "TRAIN_DATA is not set: a file of training problems"
elif [ "${DRY_RUN:-0}" != 1 ]; then
    set_up torchrun torch transformers
fi

# -- commands --------------------------------------------------------------------------------------

batch=$GLOBAL_BATCH_SIZE$BATCH_SIZE$GRAD_ACCUM
[ $demo = 0 ] || [ -z "$batch" ] || die "the demo has a batch of its own"
# everything small, so that two CPU cores show falling bounds and an accuracy in minutes
if [ $demo = 1 ]; then
    demo_steps=3200
    # after 3,200 steps one seed of eight had 80.5 % right
    if [ "$SYSTEM" = hdp ]; then demo_steps=4000; fi
    settings=(--model_size nano --dropout 0 --block_size 8 --max_length 96 --question_budget 48
        --plan_budget 32 --execution_budget 48 --row_length 128 --per_device_train_batch_size 8
        --gradient_accumulation_steps 1 --learning_rate 2e-3 --warmup_steps 100
        --lr_scheduler cosine --adam_beta2 0.98 --max_steps "$demo_steps"
        --t_range 0.4 1.0 --ema_decay 0.99 --eval_steps 400 --save_steps 0
        --logging_steps 200 --strip_calculator --num_workers 1 --report_to none
        # for under 128 noisy copies a row torch may compile flex without a backward pass
        --attn_backend sdpa)
    # on busy cores more threads make small steps many times slower
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    TEST_DATA=$OUTPUT_DIR/demo/$test_file
    SAMPLE_FLAGS="--order confidence --min_accuracy $MIN_ACCURACY"
else
    read -ra switches <<<"$SWITCHES"
    settings=(--batch_preset "$PRESET" --train_data_file "$TRAIN_DATA" --model_size "$SIZE"
        --block_size "$BLOCK_SIZE" --num_workers "$WORKERS" "${switches[@]}")
    # else gpt2, or INIT_FROM's own
    if [ -n "$TOKENIZER" ]; then settings+=(--tokenizer "$TOKENIZER"); fi
    if has_flag --per_device_train_batch_size "$@" ||
        has_flag --gradient_accumulation_steps "$@"; then
        [ -z "$batch" ] || die "the batch is set by variables and by flags: leave one out"
    elif [ $auto = 1 ]; then
        settings+=(--global_batch_size "$step")
    else
        settings+=(--problems_per_batch "$micro" --gradient_accumulation_steps "$steps")
    fi
    if [ -n "$batch" ]; then
        [ $auto = 1 ] || say "$step problems a step = $micro x $steps micro-steps x $GPUS GPUs"
        if [ "$step" != "$preset" ] && [ -z "$LR" ] && ! has_flag --learning_rate "$@"; then
            settings+=(--scale_lr_from_batch "$preset")
        fi
    fi
fi

after=''
if [ $plan = 0 ] && [ $demo = 1 ]; then         # its status is 1 unless the loss fell
    after=$(printf '%q ' python "$REPO/common/report.py" "$OUTPUT_DIR" --check_fell)$'\n'
fi
if [ $plan = 0 ] && [ -n "$TEST_DATA" ]; then
    read -ra sample_flags <<<"$SAMPLE_FLAGS"
    after+=$(printf '%q ' python "$SAMPLER" --checkpoint "$OUTPUT_DIR" --test_file "$TEST_DATA" \
        "${sample_flags[@]}")
elif [ $plan = 0 ]; then
    say "no TEST_DATA, so no accuracy"
fi

export AFTER="$after${AFTER:+$'\n'$AFTER}"
export NPROC_PER_NODE=$GPUS LOG_DIR=${LOG_DIR:-$OUTPUT_DIR/node_logs}
exec bash "$REPO/launch/slurm.sh" --system "$SYSTEM" "${settings[@]}" "${flags[@]}" \
    --output_dir "$OUTPUT_DIR" "$@"
