#!/usr/bin/env bash
# Train BD3-LM block diffusion on GSM8K on one H200, then answer the test problems; or on chats
# (SYSTEM=chat), then bound the likelihood of the test chats. Arguments go to train_bd3lm.py; so do
# overrides of BD3-LM's scripts (loader.num_workers=16), as its flags.
#
#   sbatch launch/train_gsm8k_bd3lm_h200.sh             one GPU, data and tokenizer from the hub
#   TRAIN_DATA=train.jsonl TEST_DATA=test.jsonl TOKENIZER=tokenizer.json bash launch/...    offline
#   INIT_FROM=kuleshov-group/bd3lm-owt-block_size16 sbatch launch/...   published weights: better
#   bash launch/train_gsm8k_bd3lm_h200.sh --demo        small, on problems it makes itself; no GPU
#
# DRY_RUN=1, signals, requeueing, also while it answers: launch/slurm.sh, which this one calls.
#SBATCH -J train_gsm8k_bd3lm --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@300
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=18 --mem=64G --time=24:00:00
set -euo pipefail
export LAUNCHER=${LAUNCHER:-train_gsm8k_bd3lm_h200}
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(exec 2>/dev/null; cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "$SLURM_JOB_ID" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") || :
source "${here:?env.sh not found: sbatch FILE, not sbatch < FILE}/env.sh"
export TRAINER=${TRAINER:-$REPO/diffusion/train_bd3lm.py}
declare -A overrides=([model.attn_backend]=--attn_backend [trainer.precision]=--bf16
    [model.gradient_checkpointing]=--gradient_checkpointing [trainer.compile]=--compile
    [trainer.max_steps]=--max_steps [loader.num_workers]=--num_workers [optim.lr]=--learning_rate
    [lr_scheduler.num_warmup_steps]=--warmup_steps [block_size]=--block_size [seed]=--seed)
translate "$@"
set -- "${arguments[@]}"
declare -A presets=([conservative]=256 [recommended]=512 [aggressive]=768 [extreme]=1024
    [source]=256 [finetune]=128 [convert]=64 [sdar]=64)     # problems a step; the trainer has more
SAMPLER=${SAMPLER:-$REPO/diffusion/sample_bd3lm.py}     # the script that answers
SYSTEM=${SYSTEM:-gsm8k}             # gsm8k, chat or hdp; train_hdp_diffusion_h200.sh sets hdp
MIN_ACCURACY=${MIN_ACCURACY:-0.8}   # demo: share of new problems to answer right, else status 1
cpus=$(count_cpus)
setting INIT_FROM '' --init_from    # weights to start from: hub name or folder
case $(flag_value --init_from "$INIT_FROM" "$@") in
'') preset=recommended ;; *SDAR*) preset=sdar ;; *) preset=finetune ;; esac
setting PRESET $preset              # of `presets`
PRESET=$(flag_value --batch_preset "$PRESET" "$@")
setting GLOBAL_BATCH_SIZE ''        # problems a step, of all GPUs; default: the preset's
setting BATCH_SIZE ''               # problems a GPU and micro-step
setting GRAD_ACCUM ''               # micro-steps a step
setting LR '' --learning_rate       # default: the preset's, by the root of the step
setting WARMUP_STEPS '' --warmup_steps          # default: the preset's, as that of the next
setting MAX_STEPS '' --max_steps    # optimizer steps
hub=$([ "$SYSTEM" != gsm8k ] || echo openai/gsm8k)
setting TRAIN_DATA "$hub"           # JSONL, JSON, dataset folder or hub name
setting TEST_DATA "$hub"            # the same, answered after training; empty: not
setting TOKENIZER ''                # GPT-2's files, a tokenizer.json, or a hub name (gpt2)
setting OUTPUT_DIR ''               # default outputs/SYSTEM_h200, or _demo
setting SIZE small                  # model: nano, tiny, small, medium
setting BLOCK_SIZE "$([ "$PRESET" = sdar ] && echo 4 || echo 16)"               # tokens of a block
setting GPUS 1                      # trainers, which share the problems of a step
setting WORKERS $((cpus > 16 ? 16 : cpus > 1 ? cpus - 1 : 1))       # threads that load data
setting SWITCHES '--bf16 --tf32 --compile --pack --drop_too_long --auto'        # SWITCHES= for none
setting SAMPLE_FLAGS '--bf16 --drop_too_long'                       # flags of the sampler
known_settings

demo='' after='' batch=$GLOBAL_BATCH_SIZE$BATCH_SIZE$GRAD_ACCUM
if has_flag --demo "$@"; then demo=demo; fi
OUTPUT_DIR=$(flag_value --output_dir "${OUTPUT_DIR:-outputs/${SYSTEM}_${demo:-h200}}" "$@")
[[ $SYSTEM =~ ^(gsm8k|chat|hdp)$ ]] || die "SYSTEM=$SYSTEM: gsm8k, chat or hdp"
preset=${presets[${PRESET:-none}]:-}
[ -n "$preset" ] || die "PRESET=$PRESET: one of ${!presets[*]}"
need_number GLOBAL_BATCH_SIZE BATCH_SIZE GRAD_ACCUM GPUS

if [ -n "$demo" ]; then     # small: two CPU cores show falling bounds and an accuracy in minutes
    [ -z "$batch" ] || die "the demo sets its batch itself"
    # sdpa: for under 128 noisy copies a row torch may compile flex without a backward pass
    settings=(--model_size nano --dropout 0 --block_size 8 --max_length 96 --question_budget 48
        --plan_budget 32 --execution_budget 48 --row_length 128 --per_device_train_batch_size 8
        --gradient_accumulation_steps 1 --learning_rate 2e-3 --warmup_steps 100 --adam_beta2 0.98
        --lr_scheduler cosine --max_steps "$([ "$SYSTEM" = hdp ] && echo 4000 || echo 3200)"
        --t_range 0.4 1.0 --ema_decay 0.99 --eval_steps 400 --save_steps 0 --logging_steps 200
        --num_workers 1 --report_to none --attn_backend sdpa)
    if [ "$SYSTEM" != chat ]; then settings+=(--strip_calculator); fi
    # on busy cores more threads make small steps many times slower
    export MIN_GPUS=0 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    TEST_DATA=$OUTPUT_DIR/demo/$([ "$SYSTEM" = hdp ] && echo test_hdp.json || echo test.jsonl)
    SAMPLE_FLAGS="--order confidence --min_accuracy $MIN_ACCURACY"
    # its status is 1 unless the loss fell
    after=$(printf '%q ' python "$REPO/core/report.py" "$OUTPUT_DIR" --check_fell)$'\n'
else
    [ -n "$TRAIN_DATA" ] || die "TRAIN_DATA is not set: a file of training problems"
    read -ra switches <<<"$SWITCHES"
    if ! has_flag "--(per_device_train_batch_size|gradient_accumulation_steps)" "$@"; then
        # the trainer derives the rest: GLOBAL_BATCH_SIZE = BATCH_SIZE x GRAD_ACCUM x GPUS
        if [ -z "$BATCH_SIZE" ] || [ -z "$GRAD_ACCUM" ]; then : "${GLOBAL_BATCH_SIZE:=$preset}"; fi
    elif [ -n "$batch" ]; then
        die "the batch is set by variables and by flags: leave one out"
    fi
    settings=(--batch_preset "$PRESET" --train_data_file "$TRAIN_DATA" --model_size "$SIZE"
        --block_size "$BLOCK_SIZE" --num_workers "$WORKERS" "${switches[@]}"
        ${TOKENIZER:+--tokenizer "$TOKENIZER"}
        ${GLOBAL_BATCH_SIZE:+--global_batch_size "$GLOBAL_BATCH_SIZE"}
        ${BATCH_SIZE:+--problems_per_batch "$BATCH_SIZE"}
        ${GRAD_ACCUM:+--gradient_accumulation_steps "$GRAD_ACCUM"})
    [ -z "$batch" ] || [ -n "$LR" ] || has_flag --learning_rate "$@" ||
        settings+=(--scale_lr_from_batch "$preset")
fi

if has_flag --dry_run "$@"; then after=''       # the trainer's own: nothing to answer with
elif [ -z "$TEST_DATA" ]; then say "no TEST_DATA, so no accuracy"
else
    how=--test_file
    if [ "$SYSTEM$demo" = chat ]; then how=--bound SAMPLER=${SAMPLER/sample_bd3lm/evaluate}; fi
    read -ra more <<<"$SAMPLE_FLAGS"
    after+=$(printf '%q ' python "$SAMPLER" --checkpoint "$OUTPUT_DIR" $how "$TEST_DATA" \
        "${more[@]}")
fi
export AFTER="$after${AFTER:+$'\n'$AFTER}" NPROC_PER_NODE=$GPUS
exec bash "$REPO/launch/slurm.sh" --system "$SYSTEM" "${settings[@]}" "${flags[@]}" \
    --output_dir "$OUTPUT_DIR" "$@"
