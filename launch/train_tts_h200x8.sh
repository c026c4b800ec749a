#!/usr/bin/env bash
# Fine-tuning of Higgs-Audio V2 on one node of 8 H200 GPUs: LoRA, or with LORA=0 all weights.
# Arguments go to train_v2_ddp.py, after those from here. --auto fits packs to the GPUs;
# BATCH_SIZE=4 has samples instead, and
# --gradient_checkpointing recomputes layers though the memory suffices.
#
#   TRAIN_DATA=train.json OUTPUT_DIR=out sbatch launch/train_tts_h200x8.sh     or bash
#
# Everything else - DRY_RUN=1, signals, requeueing - is slurm.sh, which this one calls.
#
#SBATCH --job-name=train_tts_h200x8 --output=%x-%j.out --open-mode=append
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=128
#SBATCH --mem=0 --time=24:00:00 --requeue --signal=B:USR1@600
set -euo pipefail
export LAUNCHER=train_tts_h200x8

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(scontrol show job \
    "${SLURM_JOB_ID:-0}" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") || here=''
[ -e "$here/env.sh" ] || { echo "$LAUNCHER: error: there is no env.sh beside it" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$here/env.sh"

export TRAINER=${TRAINER:-$REPO/train_v2_ddp.py}    # the script that torchrun starts
setting MIN_GPUS 8  # GPUs that must be there; 0 lets a dry run or a trial start anywhere
setting MODEL bosonai/higgs-audio-v2-generation-3B-base --model_path     # folder or hub name
setting CODEC bosonai/higgs-audio-v2-tokenizer --audio_tokenizer_path  # audio tokenizer
setting TRAIN_DATA ../../higgs-audio/training_data/chatml/train_chatml_samples.json \
    --train_data_file --train_data_dir                      # ChatML file, or folder
setting OUTPUT_DIR ./output --output_dir                    # checkpoints and logs
setting LR '' --learning_rate  # peak learning rate; empty, as below: the trainer's own
setting EPOCHS '' --num_train_epochs                        # passes over the data
setting WARMUP_STEPS '' --warmup_steps                      # optimizer steps
setting SAVE_STEPS '' --save_steps                          # optimizer steps between checkpoints
setting EVAL_STEPS '' --eval_steps                          # optimizer steps between validations
setting BATCH_SIZE '' --per_device_train_batch_size  # a GPU and micro-step; empty: packs
setting GRAD_ACCUM '' --gradient_accumulation_steps  # instead of the next
batch=256
if [ -n "$GRAD_ACCUM" ] || has_flag --gradient_accumulation_steps "$@"; then batch=''; fi
setting GLOBAL_BATCH_SIZE "$batch" --global_batch_size      # samples an optimizer step, about
setting LORA 1 -                                            # 1: adapters; 0: full fine-tuning
adapters=${LORA/#0}
setting LORA_RANK "${adapters:+16}" --lora_rank             # adapter rank
setting LORA_ALPHA "${adapters:+64}" --lora_alpha  # adapter scale is alpha / rank
setting LORA_TARGETS "${adapters:+all-linear}" --lora_target_modules     # layers that get adapters
setting LOADERS 4 --num_workers                             # loader processes a GPU
setting LOGGING_STEPS 5 --logging_steps                     # optimizer steps between log lines
setting REPORT_TO tensorboard -  # beside metrics.jsonl; several, separated by spaces
setting SWITCHES '--bf16 --tf32 --auto' -                   # flags without a value
# Processes that decode audio: 32 of 128 CPUs, fewer where there are fewer.
cpus=$(count_cpus)
setting PREPROCESS $((cpus < 128 ? (cpus + 3) / 4 : 32)) --preprocess_num_proc
known_settings

[ "$(count_gpus)" -ge "$MIN_GPUS" ] ||
    die "$HOSTNAME has $(count_gpus) GPUs, $MIN_GPUS are needed (MIN_GPUS)"

read_switches --parallel fsdp

if [ -z "${VENV:-}${CONDA_ENV:-}" ] && has_conda_env tts_env; then export CONDA_ENV=tts_env; fi

# The OMP threads, cores / GPUs = 16, come from slurm.sh, InfiniBand settings from env.sh.
exec bash "$REPO/launch/slurm.sh" "${flags[@]}" "${switches[@]}" "$@"
