#!/usr/bin/env bash
# Train BD3-LM block diffusion on GSM8K on one H200, then answer the test problems. Arguments go to
# diffusion/train_bd3lm.py, after those from here; overrides as BD3-LM's own scripts take them (loader.num_workers=16) are
# turned into its flags.
#
#   sbatch launch/train_gsm8k_bd3lm_h200.sh                          one GPU, data and tokenizer from the hub
#   TRAIN_DATA=train.jsonl TEST_DATA=test.jsonl TOKENIZER=gpt2_files bash launch/train_gsm8k_bd3lm_h200.sh      offline
#   PRESET=aggressive sbatch launch/train_gsm8k_bd3lm_h200.sh --strip_calculator
#   INIT_FROM=kuleshov-group/bd3lm-owt-block_size16 sbatch launch/train_gsm8k_bd3lm_h200.sh     published weights: better
#   bash launch/train_gsm8k_bd3lm_h200.sh --demo                     small, on problems it makes itself; no GPU needed
#
# Everything else - DRY_RUN=1, signals, requeueing - is slurm.sh, which this one calls. A job whose time is over while
# problems are answered is queued again, too: they are answered anew.
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
export LAUNCHER=${LAUNCHER:-train_gsm8k_bd3lm_h200}

repo=${REPO:-$(dirname "${BASH_SOURCE[0]}")/..}     # sbatch runs a copy of this file; Slurm knows the original
[ -n "${REPO:-}" ] || [ -e "$repo/launch/env.sh" ] || repo=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "${SLURM_JOB_ID:-0}" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1/..|p")") || repo=''
[ -e "$repo/launch/env.sh" ] || { echo "$LAUNCHER: error: no launch/env.sh in '$repo'; set REPO" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$repo/launch/env.sh"

export TRAINER=${TRAINER:-$REPO/diffusion/train_bd3lm.py} # the script that torchrun starts
SAMPLER=${SAMPLER:-$REPO/diffusion/sample_bd3lm.py}       # the script that answers
SYSTEM=${SYSTEM:-gsm8k}                         # gsm8k or hdp; train_hdp_diffusion_h200.sh sets hdp
setting INIT_FROM '' --init_from                # weights to start from: hub name, folder, .ckpt; default: none
setting PRESET "$([ -n "$INIT_FROM" ] && echo finetune || echo recommended)"    # problems, rate, steps; all: below
setting GLOBAL_BATCH_SIZE ''                    # problems a step, of all GPUs; default: the preset's
setting BATCH_SIZE ''                           # problems a GPU and micro-step
setting GRAD_ACCUM ''                           # micro-steps a step
setting LR '' --learning_rate                   # default: the preset's, times the root of how much larger the step is
setting WARMUP_STEPS '' --warmup_steps          # default: the preset's, as that of the next
setting MAX_STEPS '' --max_steps                # optimizer steps
TRAIN_DATA=${TRAIN_DATA-openai/gsm8k}           # JSONL, JSON, dataset folder or hub name
TEST_DATA=${TEST_DATA-openai/gsm8k}             # the same with a test split, answered after training; empty: not done
TOKENIZER=${TOKENIZER:-}                        # folder with GPT-2's files or tokenizer.json, or hub name; default gpt2
OUTPUT_DIR=${OUTPUT_DIR:-}                      # checkpoints, logs, answers; default outputs/SYSTEM_h200, or _demo
SIZE=${SIZE:-small}                             # model: nano, tiny, small, medium
BLOCK_SIZE=${BLOCK_SIZE:-16}                    # tokens of a block
GPUS=${GPUS:-1}                                 # trainers, which share the problems of a step
MIN_GPUS=${MIN_GPUS:-1}                         # GPUs that must be there; 0 lets a dry run or a trial start anywhere
switches='--bf16 --tf32 --compile --pack --drop_too_long --auto'
SWITCHES=${SWITCHES-$switches}                  # flags without a value; SWITCHES= gives none of them
SAMPLE_FLAGS=${SAMPLE_FLAGS---bf16 --drop_too_long}     # flags of the sampler
MIN_ACCURACY=${MIN_ACCURACY:-0.8}               # demo: share of new problems to answer right, else its status is 1
LOG_DIR=${LOG_DIR:-}                            # where the output is kept, over requeues; default OUTPUT_DIR/node_logs
cpus=$(count_cpus)
WORKERS=${WORKERS:-$((cpus > 16 ? 16 : cpus > 1 ? cpus - 1 : 1))}       # loader processes a trainer

known+=(TRAIN_DATA TEST_DATA TOKENIZER OUTPUT_DIR SIZE BLOCK_SIZE GPUS SWITCHES SAMPLE_FLAGS WORKERS HDP_LAYOUT)
known_settings

# -- overrides ---------------------------------------------------------------------------------------------------------

words=()
for argument in "$@"; do
    word=${argument#+} value=${argument#*=}
    case ${word#+} in
    -* | [!a-z]*) words+=("$argument") ;;
    model.attn_backend=flash_attn)
        say "$argument: flash attention has no masks of blocks; flex, which skips what they hide, is used"
        words+=(--attn_backend flex) ;;
    model.attn_backend=*) words+=(--attn_backend "$value") ;;
    trainer.precision=bf16*) words+=(--bf16) ;;
    trainer.precision=32*) words+=(--bf16 false) ;;
    model.gradient_checkpointing=*) words+=(--gradient_checkpointing "$value") ;;
    trainer.compile=*) words+=(--compile "$value") ;;
    trainer.max_steps=*) words+=(--max_steps "$value") ;;
    loader.num_workers=*) words+=(--num_workers "$value") ;;
    optim.lr=*) words+=(--learning_rate "$value") ;;
    lr_scheduler.num_warmup_steps=*) words+=(--warmup_steps "$value") ;;
    block_size=*) words+=(--block_size "$value") ;;
    seed=*) words+=(--seed "$value") ;;
    [a-z]*.[a-z]*=*) die "$argument: not one of the overrides that are known here; give the flag ($TRAINER --help all)" ;;
    *) words+=("$argument") ;;
    esac
done
set -- "${words[@]}"

demo=0 plan=0
for argument in "$@"; do
    case $argument in
    --demo | --demo=*) demo=1 ;;
    --dry_run | --dry_run=*) plan=1 ;;          # the trainer's own dry run: no checkpoint, nothing to answer with
    esac
done
OUTPUT_DIR=${OUTPUT_DIR:-outputs/${SYSTEM}_$([ $demo = 1 ] && echo demo || echo h200)}
OUTPUT_DIR=$(flag_value --output_dir "$OUTPUT_DIR" "$@")

# -- checks ------------------------------------------------------------------------------------------------------------

case $SYSTEM in
gsm8k) test_file=test.jsonl ;;
hdp) test_file=test_hdp.json ;;
*) die "SYSTEM=$SYSTEM: gsm8k or hdp" ;;
esac
# shellcheck disable=SC2153     # setting made it
case $PRESET in
conservative | recommended | aggressive | extreme | source | finetune | convert) ;;
*) die "PRESET=$PRESET: conservative, recommended, aggressive, extreme, source, finetune or convert" ;;
esac
# Problems a step = problems a GPU and micro-step x micro-steps x GPUs; what is not set follows.
each=4
case $PRESET in
conservative) problems=64 ;;
recommended) problems=128 ;;
aggressive) problems=192 ;;
extreme) problems=256 ;;
source) problems=16 each=16 ;;
finetune) problems=64 each=2 ;;
convert) problems=64 each=1 ;;
esac
auto=0                      # the trainer splits a step into micro-steps, whatever the number of GPUs
read -ra words <<<"$SWITCHES"
if [ -z "$BATCH_SIZE$GRAD_ACCUM" ] && has_flag --auto "${words[@]}"; then auto=1; fi
preset=$((problems * each)) step=${GLOBAL_BATCH_SIZE:-} micro=$BATCH_SIZE steps=$GRAD_ACCUM
for name in GLOBAL_BATCH_SIZE BATCH_SIZE GRAD_ACCUM GPUS; do
    [[ -z ${!name} || ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name}: a number from 1 on"
done
if [ $auto = 1 ]; then
    step=${step:-$preset}
elif [ -n "$micro" ] && [ -n "$steps" ]; then
    [ -z "$step" ] || [ "$step" = $((micro * steps * GPUS)) ] ||
        die "GLOBAL_BATCH_SIZE=$step is not BATCH_SIZE x GRAD_ACCUM x GPUS = $((micro * steps * GPUS))"
    step=$((micro * steps * GPUS))
else
    step=${step:-$preset}
    if [ -z "$steps" ] && [ -z "$micro" ]; then     # the preset's micro-steps while each GPU has whole ones
        micro=$problems
        if [ $((step / GPUS)) -lt "$micro" ]; then micro=$((step / GPUS)); fi
    fi
    if [ -z "$steps" ]; then steps=$((step / (micro * GPUS))); else micro=$((step / (steps * GPUS))); fi
    [ $((micro * steps * GPUS)) = "$step" ] && [ "$step" -gt 0 ] ||
        die "$step problems a step cannot be shared out: set BATCH_SIZE, GRAD_ACCUM, GPUS ($GPUS) whose product they are"
fi

gpus=$(count_gpus)
[ "$gpus" = 0 ] || [ "$GPUS" -le "$gpus" ] || die "GPUS=$GPUS, but $HOSTNAME has $gpus"
if [ $demo = 0 ]; then
    [ "$gpus" -ge "$MIN_GPUS" ] || die "$HOSTNAME has $gpus GPUs, $MIN_GPUS are needed (MIN_GPUS); --demo needs none"
    [ -n "$TRAIN_DATA" ] || die "TRAIN_DATA is not set: a file of training problems"
elif [ "${DRY_RUN:-0}" != 1 ]; then
    set_up torchrun torch transformers
fi

# -- commands ----------------------------------------------------------------------------------------------------------

[ $demo = 0 ] || [ -z "$GLOBAL_BATCH_SIZE$BATCH_SIZE$GRAD_ACCUM" ] || die "the demo has a batch of its own"
if [ $demo = 1 ]; then      # everything small, so that two CPU cores show falling bounds and an accuracy in minutes
    demo_steps=3200
    if [ "$SYSTEM" = hdp ]; then demo_steps=4000; fi    # after 3,200 one seed of eight had 80.5 % right
    settings=(--model_size nano --dropout 0 --block_size 8 --max_length 96 --question_budget 48 --plan_budget 32
        --execution_budget 48 --row_length 128 --per_device_train_batch_size 8 --gradient_accumulation_steps 1
        --learning_rate 2e-3 --warmup_steps 100 --lr_scheduler cosine --adam_beta2 0.98 --max_steps "$demo_steps"
        --t_range 0.4 1.0 --ema_decay 0.99 --eval_steps 400 --save_steps 0
        --logging_steps 200 --strip_calculator --num_workers 1 --report_to none
        --attn_backend sdpa)    # for under 128 noisy copies a row torch may compile flex without a backward pass
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}    # on busy cores more threads make small steps many times slower
    TEST_DATA=$OUTPUT_DIR/demo/$test_file
    SAMPLE_FLAGS="--order confidence --min_accuracy $MIN_ACCURACY"
else
    read -ra switches <<<"$SWITCHES"
    settings=(--batch_preset "$PRESET" --train_data_file "$TRAIN_DATA" --model_size "$SIZE"
        --block_size "$BLOCK_SIZE" --num_workers "$WORKERS" "${switches[@]}")
    if [ -n "$TOKENIZER" ]; then settings+=(--tokenizer "$TOKENIZER"); fi      # else gpt2, or INIT_FROM's own
    if has_flag --per_device_train_batch_size "$@" || has_flag --gradient_accumulation_steps "$@"; then
        [ -z "$GLOBAL_BATCH_SIZE$BATCH_SIZE$GRAD_ACCUM" ] ||
            die "the batch is set by variables and by flags: leave one out"
    elif [ $auto = 1 ]; then
        settings+=(--global_batch_size "$step")
    else
        settings+=(--problems_per_batch "$micro" --gradient_accumulation_steps "$steps")
    fi
    if [ -n "$GLOBAL_BATCH_SIZE$BATCH_SIZE$GRAD_ACCUM" ]; then
        [ $auto = 1 ] || say "$step problems a step = $micro x $steps micro-steps x $GPUS GPUs"
        if [ "$step" != "$preset" ] && [ -z "$LR" ] && ! has_flag --learning_rate "$@"; then settings+=(--scale_lr_from_batch "$preset"); fi
    fi
fi

after=''
if [ $plan = 0 ] && [ $demo = 1 ]; then         # its status is 1 unless the loss fell
    after=$(printf '%q ' python "$REPO/common/report.py" "$OUTPUT_DIR" --check_fell)$'\n'
fi
if [ $plan = 0 ] && [ -n "$TEST_DATA" ]; then
    read -ra sample_flags <<<"$SAMPLE_FLAGS"
    after+=$(printf '%q ' python "$SAMPLER" --checkpoint "$OUTPUT_DIR" --test_file "$TEST_DATA" "${sample_flags[@]}")
elif [ $plan = 0 ]; then
    say "no TEST_DATA, so no accuracy"
fi

export AFTER="$after${AFTER:+$'\n'$AFTER}"
export NPROC_PER_NODE=$GPUS LOG_DIR=${LOG_DIR:-$OUTPUT_DIR/node_logs}
exec bash "$REPO/launch/slurm.sh" --system "$SYSTEM" "${settings[@]}" "${flags[@]}" --output_dir "$OUTPUT_DIR" "$@"
