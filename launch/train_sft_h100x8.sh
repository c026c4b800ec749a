#!/usr/bin/env bash
# Fine-tuning of a 4B student on chats on one node of 8 H100 GPUs: all weights, or with LORA=1 adapters.
#
#   TRAIN_FILE=labels.jsonl bash launch/train_sft_h100x8.sh OUT [flags of distill/train_sft.py]
#   TRAIN_FILE=labels.jsonl sbatch launch/train_sft_h100x8.sh OUT ...       the same as a Slurm job
#
# Right on 1, 2 and 4 GPUs too: --auto fits packs to the GPUs, and a step stays about GLOBAL_BATCH_SIZE samples, or with
# BATCH_SIZE=16 just that. Everything else - DRY_RUN=1, signals, requeueing - is slurm.sh, which this one calls.
#
#SBATCH --job-name=train_sft_h100x8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=4:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=%x-%j.out
set -euo pipefail
export LAUNCHER=train_sft_h100x8

repo=${REPO:-$(dirname "${BASH_SOURCE[0]}")/..}     # sbatch runs a copy of this file; Slurm knows the original
[ -n "${REPO:-}" ] || [ -e "$repo/launch/env.sh" ] || repo=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "${SLURM_JOB_ID:-0}" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1/..|p")") || repo=''
[ -e "$repo/launch/env.sh" ] || { echo "$LAUNCHER: error: no launch/env.sh in '$repo'; set REPO" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$repo/launch/env.sh"

export TRAINER=${TRAINER:-$REPO/distill/train_sft.py}       # the script that torchrun starts
setting MODEL Qwen/Qwen3-4B-Instruct-2507 --model_path      # folder or hub name of the student
setting TRAIN_FILE ./data/prompt_distillation_lang.jsonl --train_data_file      # what create_data_h100x8.sh writes
setting BATCH_SIZE '' --per_device_train_batch_size         # samples a GPU and micro-step; empty: packs of tokens
batch=128 held_out=0.05
if has_flag --gradient_accumulation_steps "$@"; then batch=''; fi
if has_flag --eval_data_file "$@"; then held_out=''; fi
setting GLOBAL_BATCH_SIZE "$batch" --global_batch_size      # samples an optimizer step
setting EPOCHS 4 --num_train_epochs                         # passes over the training samples
setting VALIDATION "$held_out" --validation_split           # share of groups held out, unless --eval_data_file is given
setting GROUP_SIZE 15 --group_size          # neighbouring lines that are one group, such as translations of one sentence
setting LR '' --learning_rate                               # peak learning rate; empty, as the next: the trainer's own
setting WARMUP_STEPS '' --warmup_steps                      # optimizer steps
setting LORA 0 -                                            # 1: adapters; 0: full fine-tuning
setting LOADERS 2 --num_workers                             # loader processes a GPU
setting LOGGING_STEPS 5 --logging_steps                     # optimizer steps between log lines
setting REPORT_TO tensorboard -                             # beside metrics.jsonl; several, separated by spaces
setting SWITCHES '--bf16 --tf32 --auto' -                   # flags without a value; SWITCHES= gives none of them
known_settings

case ${1:-} in '' | -*) die "the first argument is the output folder: $LAUNCHER.sh OUT [flags]" ;; esac
out=$1
shift

# Overrides as people have them of verl's scripts, turned into flags.
words=()
for argument in "$@"; do
    word=${argument#+} value=${argument#*=}
    case ${word#+} in
    -* | [!a-z]*) words+=("$argument") ;;
    data.micro_batch_size_per_gpu=*) words+=(--per_device_train_batch_size "$value") ;;
    data.train_batch_size=*) words+=(--global_batch_size "$value") ;;
    data.train_files=*) words+=(--train_data_file "$value") ;;
    data.val_files=*) words+=(--eval_data_file "$value" --validation_split 0) ;;
    data.max_length=*) words+=(--max_length "$value") ;;
    model.partial_pretrain=* | model.path=*) words+=(--model_path "$value") ;;
    model.fsdp_config.model_dtype=bf16 | model.fsdp_config.model_dtype=bfloat16) words+=(--bf16) ;;
    model.fsdp_config.model_dtype=fp32 | model.fsdp_config.model_dtype=float32) words+=(--bf16 false) ;;
    model.enable_gradient_checkpointing=*) words+=(--gradient_checkpointing "$value") ;;
    optim.lr=*) words+=(--learning_rate "$value") ;;
    trainer.total_epochs=*) words+=(--num_train_epochs "$value") ;;
    trainer.default_local_dir=*) words+=(--output_dir "$value") ;;
    [a-z]*.[a-z]*=*) die "$argument: not one of the overrides that are known here; give the flag ($TRAINER --help all)" ;;
    *) words+=("$argument") ;;
    esac
done
set -- "${words[@]}"

# shellcheck disable=SC2153     # setting made it
read -ra switches <<<"$SWITCHES"
read -ra reports <<<"$REPORT_TO"
if [ -n "$REPORT_TO" ]; then switches+=(--report_to "${reports[@]}"); fi
case $LORA in
1) switches+=(--use_lora) ;;
0 | '') ;;
*) die "LORA=$LORA: 1 or 0" ;;
esac

exec bash "$REPO/launch/slurm.sh" "${flags[@]}" --output_dir "$out" "${switches[@]}" "$@"
