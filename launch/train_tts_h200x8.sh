#!/usr/bin/env bash
# Fine-tuning of Higgs-Audio V2 on one node of 8 H200 GPUs: LoRA under DDP, or with LORA=0 all weights under FSDP.
# Arguments go to train_v2_ddp.py, after those from here.
#
#   sbatch launch/train_tts_h200x8.sh --model_path ... --audio_tokenizer_path ... --train_data_file ... --output_dir ...
#   bash launch/train_tts_h200x8.sh   ... the same, on the machine itself
#
# Everything else - DRY_RUN=1, signals, requeueing - is slurm.sh, which this one calls.
#
#SBATCH --job-name=train_tts_h200x8
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=128
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=%x-%j.out
set -euo pipefail
export LAUNCHER=train_tts_h200x8

repo=${REPO:-$(dirname "${BASH_SOURCE[0]}")/..}     # sbatch runs a copy of this file; Slurm knows the original
[ -n "${REPO:-}" ] || [ -e "$repo/launch/env.sh" ] || repo=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "${SLURM_JOB_ID:-0}" | sed -n 's|^ *Command=\(.*\)launch/[a-z0-9_]*\.sh.*|\1.|p')") || repo=''
[ -e "$repo/launch/env.sh" ] || { echo "$LAUNCHER: error: no launch/env.sh in '$repo'; set REPO" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$repo/launch/env.sh"

export TRAINER=${TRAINER:-$REPO/train_v2_ddp.py}    # the script that torchrun starts
MIN_GPUS=${MIN_GPUS:-8}             # GPUs that must be there; 0 lets a dry run or a trial start anywhere
BATCH=${BATCH:-4}                   # samples a GPU and micro-step
GLOBAL_BATCH=${GLOBAL_BATCH:-256}   # samples an optimizer step: 4 x 8 GPUs x 8 micro-steps; 0 leaves it to other flags
LORA=${LORA:-1}                     # 1: adapters; 0: full fine-tuning
LORA_RANK=${LORA_RANK:-16}          # adapter rank
LORA_ALPHA=${LORA_ALPHA:-64}        # adapter scale is alpha / rank; this and the next as in the ms-swift line it replaces
LORA_TARGETS=${LORA_TARGETS:-all-linear}    # layers that get adapters
LOADERS=${LOADERS:-4}               # loader processes a GPU
LOGGING_STEPS=${LOGGING_STEPS:-5}   # optimizer steps between log lines
REPORT_TO=${REPORT_TO:-tensorboard} # beside metrics.jsonl
switches='--bf16 --tf32 --gradient_checkpointing --group_by_length'
SWITCHES=${SWITCHES-$switches}      # flags without a value; SWITCHES= gives none of them
# Processes that decode audio: 32 of 128 CPUs, fewer on a smaller machine or with less than 2 GiB of memory for each.
cpus=$(count_cpus) memory=$(count_memory)
PREPROCESS=${PREPROCESS:-$(printf '%s\n' 32 $(((cpus + 3) / 4)) $(((memory + 1) / 2)) | sort -n | head -n 1)}

[ "$(count_gpus)" -ge "$MIN_GPUS" ] || die "$HOSTNAME has $(count_gpus) GPUs, $MIN_GPUS are needed (MIN_GPUS)"

case $LORA in
1) trained=(--use_lora --lora_rank "$LORA_RANK" --lora_alpha "$LORA_ALPHA" --lora_target_modules "$LORA_TARGETS") ;;
0) trained=(--parallel fsdp) ;;
*) die "LORA=$LORA: 1 or 0" ;;
esac

if [ -z "${VENV:-}${CONDA_ENV:-}" ] && has_conda_env tts_env; then export CONDA_ENV=tts_env; fi

# The OMP threads, cores / GPUs = 16, come from slurm.sh, InfiniBand settings from env.sh.
read -ra switches <<<"$SWITCHES"
exec bash "$REPO/launch/slurm.sh" --per_device_train_batch_size "$BATCH" --global_batch_size "$GLOBAL_BATCH" \
    "${trained[@]}" --num_workers "$LOADERS" --preprocess_num_proc "$PREPROCESS" --logging_steps "$LOGGING_STEPS" \
    --report_to "$REPORT_TO" "${switches[@]}" "$@"
