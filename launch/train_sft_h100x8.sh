#!/usr/bin/env bash
# Fine-tuning of a 4B student on chats on one node of 8 H100 GPUs: all weights under FSDP2, or with LORA=1 adapters.
#
#   MODEL=Qwen/Qwen3-4B-Instruct-2507 TRAIN_FILE=labels.jsonl bash launch/train_sft_h100x8.sh OUT [flags of distill/train_sft.py]
#   MODEL=... TRAIN_FILE=... sbatch launch/train_sft_h100x8.sh OUT ...      the same as a Slurm job
#
# Right on 1, 2 and 4 GPUs too: a step stays GLOBAL_BATCH samples. Everything else - DRY_RUN=1, signals, requeueing - is
# slurm.sh, which this one calls.
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
    scontrol show job "${SLURM_JOB_ID:-0}" | sed -n 's|^ *Command=\(.*\)launch/[a-z0-9_]*\.sh.*|\1.|p')") || repo=''
[ -e "$repo/launch/env.sh" ] || { echo "$LAUNCHER: error: no launch/env.sh in '$repo'; set REPO" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$repo/launch/env.sh"

export TRAINER=${TRAINER:-$REPO/distill/train_sft.py}       # the script that torchrun starts
MODEL=${MODEL:-Qwen/Qwen3-4B-Instruct-2507}     # folder or hub name of the student
TRAIN_FILE=${TRAIN_FILE:-}          # chat JSONL
BATCH=${BATCH:-16}                  # samples a GPU and micro-step
GLOBAL_BATCH=${GLOBAL_BATCH:-128}   # samples an optimizer step: 16 x 8 GPUs; 0 leaves it to other flags
EPOCHS=${EPOCHS:-4}                 # passes over the training samples
VALIDATION=${VALIDATION:-0.05}      # share of groups held out; 0 when --eval_data_file is given
GROUP_SIZE=${GROUP_SIZE:-15}        # neighbouring lines that are one group, such as translations of one sentence
LORA=${LORA:-0}                     # 1: adapters; 0: full fine-tuning
LOADERS=${LOADERS:-2}               # loader processes a GPU
LOGGING_STEPS=${LOGGING_STEPS:-5}   # optimizer steps between log lines
REPORT_TO=${REPORT_TO:-tensorboard} # beside metrics.jsonl
switches='--bf16 --tf32'
SWITCHES=${SWITCHES-$switches}      # flags without a value; SWITCHES= gives none of them

case ${1:-} in '' | -*) die "the first argument is the output folder: $LAUNCHER.sh OUT [flags]" ;; esac
out=$1
shift
if [ -z "$TRAIN_FILE" ]; then TRAIN_FILE=$(flag_value --train_data_file "" "$@"); fi
[ -n "$TRAIN_FILE" ] || die "set TRAIN_FILE to the chat JSONL to train on"
case $LORA in
1) trained=(--use_lora) ;;
0) trained=() ;;
*) die "LORA=$LORA: 1 or 0" ;;
esac

read -ra switches <<<"$SWITCHES"
exec bash "$REPO/launch/slurm.sh" --model_path "$MODEL" --train_data_file "$TRAIN_FILE" --output_dir "$out" \
    --per_device_train_batch_size "$BATCH" --global_batch_size "$GLOBAL_BATCH" --num_train_epochs "$EPOCHS" \
    --validation_split "$VALIDATION" --group_size "$GROUP_SIZE" "${trained[@]}" --num_workers "$LOADERS" \
    --logging_steps "$LOGGING_STEPS" --report_to "$REPORT_TO" "${switches[@]}" "$@"
