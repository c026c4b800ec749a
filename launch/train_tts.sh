#!/usr/bin/env bash
# Train Higgs-Audio V2 on one node or many: adapters, or with LORA=0 all weights; --auto fits the
# run to the GPUs. Arguments go to train_v2_ddp.py; they, and --config FILE, count more than the
# defaults below.
#
#   sbatch launch/train_tts.sh                                      2 nodes; or sbatch --nodes=1
#   TRAIN_DATA=train.json OUTPUT_DIR=out bash launch/train_tts.sh   this machine, all its GPUs
#
# All else - VENV, NPROC_PER_NODE, DRY_RUN=1 ..., signals and requeueing - is slurm.sh, which this
# one calls. train_tts_h200x8.sh is this one with other defaults.
#
#SBATCH --job-name=train_tts --output=%x-%j.out --open-mode=append
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --mem=0 --time=24:00:00 --requeue --signal=B:USR1@600
set -euo pipefail
export LAUNCHER=${LAUNCHER:-train_tts}

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(scontrol show job \
    "${SLURM_JOB_ID:-0}" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") ||
    { echo "$LAUNCHER: error: there is no env.sh beside it" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$here/env.sh"

export TRAINER=${TRAINER:-$REPO/train_v2_ddp.py}        # the script that torchrun starts
setting MIN_GPUS 0  # GPUs that must be there
setting MODEL bosonai/higgs-audio-v2-generation-3B-base --model_path     # folder or hub name
setting CODEC bosonai/higgs-audio-v2-tokenizer --audio_tokenizer_path  # audio tokenizer
setting TRAIN_DATA ../../higgs-audio/training_data/chatml/train_chatml_samples.json \
    --train_data_file --train_data_dir                      # ChatML file, or folder
setting OUTPUT_DIR ./output_expmt_v1 --output_dir           # checkpoints and logs
setting LR 5e-5 --learning_rate                             # peak learning rate
setting EPOCHS 3 --num_train_epochs                         # passes over the data
setting LORA 1 -                                            # 1: adapters; 0: full fine-tuning
setting SWITCHES '--bf16 --auto' -  # flags without a value; SWITCHES= gives none of them
# Without a default, so --auto chooses, or the trainer's own rule counts:
setting BATCH_SIZE '' --per_device_train_batch_size         # samples a GPU and micro-step
setting GRAD_ACCUM '' --gradient_accumulation_steps         # micro-steps an optimizer step
if [ -n "$GRAD_ACCUM" ] || has_flag --gradient_accumulation_steps "$@"; then
    defaults[GLOBAL_BATCH_SIZE]=''
fi
setting GLOBAL_BATCH_SIZE '' --global_batch_size  # samples an optimizer step, instead of GRAD_ACCUM
setting WARMUP_STEPS '' --warmup_steps                      # optimizer steps
setting SAVE_STEPS '' --save_steps                          # optimizer steps between checkpoints
setting EVAL_STEPS '' --eval_steps                          # optimizer steps between validations
if [ -z "${LORA/#0}" ]; then defaults+=([LORA_RANK]='' [LORA_ALPHA]='' [LORA_TARGETS]=''); fi
setting LORA_RANK '' --lora_rank                            # adapter rank
setting LORA_ALPHA '' --lora_alpha                          # adapter scale is alpha / rank
setting LORA_TARGETS '' --lora_target_modules               # layers that get adapters
setting LOADERS '' --num_workers                            # loader processes a GPU
setting PREPROCESS '' --preprocess_num_proc                 # processes that decode audio
setting LOGGING_STEPS '' --logging_steps                    # optimizer steps between log lines
setting REPORT_TO '' -  # beside metrics.jsonl; several, separated by spaces
known_settings
[ "$(count_gpus)" -ge "$MIN_GPUS" ] ||
    die "$HOSTNAME has $(count_gpus) GPUs, $MIN_GPUS are needed (MIN_GPUS)"
read_switches --parallel fsdp

if [ -z "${VENV:-}${CONDA_ENV:-}" ] && has_conda_env tts_env; then export CONDA_ENV=tts_env; fi

# The OMP threads, cores / GPUs, come from slurm.sh, InfiniBand settings from env.sh.
exec bash "$REPO/launch/slurm.sh" "${flags[@]}" "${switches[@]}" "$@"
