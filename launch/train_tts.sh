#!/usr/bin/env bash
# Train Higgs-Audio V2 on one node or many: adapters, or with LORA=0 all weights; --auto fits the
# run to the GPUs. Flags of train_v2_ddp.py and --config FILE override the settings below.
#
#   TRAIN_DATA=train.json sbatch launch/train_tts.sh                2 nodes; or sbatch --nodes=1
#   TRAIN_DATA=train.json OUTPUT_DIR=out bash launch/train_tts.sh   this machine, all its GPUs
# VENV, NPROC_PER_NODE, DRY_RUN=1, signals, requeueing: launch/slurm.sh, which this one calls.
#SBATCH -J train_tts --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@600
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --mem=0 --time=24:00:00
set -euo pipefail
export LAUNCHER=${LAUNCHER:-train_tts}
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(exec 2>/dev/null; cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "$SLURM_JOB_ID" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") || :
source "${here:?env.sh not found: sbatch FILE, not sbatch < FILE}/env.sh"
export TRAINER=${TRAINER:-$REPO/train_v2_ddp.py}        # the script that torchrun starts
setting MODEL bosonai/higgs-audio-v2-generation-3B-base --model_path    # folder or hub name
setting CODEC bosonai/higgs-audio-v2-tokenizer --audio_tokenizer_path   # audio tokenizer
setting TRAIN_DATA '' --train_data_file --train_data_dir    # ChatML file, or folder
setting OUTPUT_DIR ./output_expmt_v1 --output_dir           # checkpoints and logs
setting LR 5e-5 --learning_rate                             # peak learning rate
setting EPOCHS 3 --num_train_epochs                         # passes over the data
setting LORA 1 -                                            # 1: adapters; 0: full fine-tuning
setting SWITCHES '--bf16 --auto' -                  # flags without a value; SWITCHES= gives none
# Without a default, so --auto chooses, or the trainer's own rule counts:
setting BATCH_SIZE '' --per_device_train_batch_size         # samples a GPU and micro-step
setting GRAD_ACCUM '' --gradient_accumulation_steps         # micro-steps an optimizer step
if [ -n "$GRAD_ACCUM" ] || has_flag --gradient_accumulation_steps "$@"; then
    defaults[GLOBAL_BATCH_SIZE]=''
fi
setting GLOBAL_BATCH_SIZE '' --global_batch_size    # samples an optimizer step, not GRAD_ACCUM
setting WARMUP_STEPS '' --warmup_steps                      # optimizer steps
setting SAVE_STEPS '' --save_steps                          # optimizer steps between checkpoints
setting EVAL_STEPS '' --eval_steps                          # optimizer steps between validations
if [ -z "${LORA/#0}" ]; then defaults+=([LORA_RANK]='' [LORA_ALPHA]='' [LORA_TARGETS]=''); fi
setting LORA_RANK '' --lora_rank                            # adapter rank
setting LORA_ALPHA '' --lora_alpha                          # adapter scale is alpha / rank
setting LORA_TARGETS '' --lora_target_modules               # layers that get adapters
setting LOADERS '' --num_workers                            # threads that load data, a GPU
setting PREPROCESS '' --preprocess_num_proc                 # processes that decode audio
setting LOGGING_STEPS '' --logging_steps                    # optimizer steps between log lines
setting REPORT_TO '' -                              # besides metrics.jsonl, separated by spaces
known_settings
read_switches
[ "$LORA" != 0 ] || has_flag --auto "${switches[@]}" || switches+=(--parallel fsdp)
[ -n "$TRAIN_DATA" ] || has_flag --train_data_file "$@" || has_flag --train_data_dir "$@" ||
    has_flag --config "$@" || die "TRAIN_DATA is not set: a ChatML file or a folder of them"
if [ -z "${VENV:-}" ] && conda env list 2>/dev/null | grep '^tts_env ' >/dev/null; then
    export CONDA_ENV=${CONDA_ENV:-tts_env}
fi
exec bash "$REPO/launch/slurm.sh" "${flags[@]}" "${switches[@]}" "$@"
