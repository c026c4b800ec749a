#!/usr/bin/env bash
# Fine-tune a 4B student on chats on one node of 8 H100: all weights, or adapters with LORA=1.
#
#   TRAIN_FILE=labels.jsonl bash launch/train_sft_h100x8.sh OUT [flags of distill/train_sft.py]
#   TRAIN_FILE=labels.jsonl sbatch launch/train_sft_h100x8.sh OUT ...       the same as a Slurm job
#
# Also on 1, 2 and 4 GPUs: --auto fits packs to the GPUs, and a step stays about GLOBAL_BATCH_SIZE
# samples. DRY_RUN=1, signals, requeueing: launch/slurm.sh, which this one calls.
#SBATCH -J train_sft_h100x8 --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@600
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --mem=0 --time=4:00:00
set -euo pipefail
export LAUNCHER=train_sft_h100x8
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(exec 2>/dev/null; cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "$SLURM_JOB_ID" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") || :
source "${here:?env.sh not found: sbatch FILE, not sbatch < FILE}/env.sh"
export TRAINER=${TRAINER:-$REPO/distill/train_sft.py}       # the script that torchrun starts
[[ ${1:--} != -* ]] || die "the first argument is the output folder: $LAUNCHER.sh OUT [flags]"
declare -A overrides=(          # as people have them of verl's scripts
    [data.micro_batch_size_per_gpu]=--per_device_train_batch_size [data.max_length]=--max_length
    [data.train_batch_size]=--global_batch_size [data.train_files]=--train_data_file
    [data.val_files]=--eval_data_file [trainer.total_epochs]=--num_train_epochs
    [model.fsdp_config.model_dtype]=--bf16 [model.partial_pretrain]=--model_path
    [model.enable_gradient_checkpointing]=--gradient_checkpointing [model.path]=--model_path
    [optim.lr]=--learning_rate [trainer.default_local_dir]=--output_dir)
translate "${@:2}"
setting MODEL Qwen/Qwen3-4B-Instruct-2507 --model_path      # folder or hub name of the student
setting TRAIN_FILE ./data/prompt_distillation_lang.jsonl --train_data_file  # teacher labels
setting BATCH_SIZE '' --per_device_train_batch_size  # a GPU and micro-step; empty: packs
batch=128 held_out=0.05
if has_flag --gradient_accumulation_steps "${arguments[@]}"; then batch=''; fi
if has_flag --eval_data_file "${arguments[@]}"; then held_out=''; fi
setting GLOBAL_BATCH_SIZE "$batch" --global_batch_size      # samples an optimizer step
setting EPOCHS 4 --num_train_epochs                         # passes over the training samples
setting VALIDATION "$held_out" --validation_split  # share of groups held out
setting GROUP_SIZE 15 --group_size  # neighbouring lines that are one group, such as translations
setting LR '' --learning_rate  # peak learning rate; empty, as the next: the trainer's own
setting WARMUP_RATIO '' --warmup_ratio                      # share of the run
setting LORA 0 -                                            # 1: adapters; 0: full fine-tuning
setting LOADERS 2 --num_workers                             # threads that load data, a GPU
setting LOGGING_STEPS 5 --logging_steps                     # optimizer steps between log lines
setting REPORT_TO tensorboard -  # besides metrics.jsonl; several, separated by spaces
setting SWITCHES '--bf16 --tf32 --auto' -  # flags without a value; SWITCHES= gives none of them
known_settings
read_switches
exec bash "$REPO/launch/slurm.sh" "${flags[@]}" --output_dir "$1" "${switches[@]}" "${arguments[@]}"
