#!/usr/bin/env bash
# Train Higgs-Audio V2 on one node of 8 H200: train_tts.sh with other defaults. --auto fits packs to
# the GPUs; BATCH_SIZE=4 has samples instead. Arguments go to train_v2_ddp.py.
#
#   TRAIN_DATA=train.json OUTPUT_DIR=out sbatch launch/train_tts_h200x8.sh     or bash
#SBATCH -J train_tts_h200x8 --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@600
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64 --mem=0 --time=24:00:00
set -euo pipefail
export LAUNCHER=train_tts_h200x8
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(exec 2>/dev/null; cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "$SLURM_JOB_ID" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") || :
source "${here:?env.sh not found: sbatch FILE, not sbatch < FILE}/env.sh"
cpus=$(count_cpus)
declare -A defaults=(           # empty: the trainer's own; the batch: about, where packs are fitted
    [OUTPUT_DIR]=./output [LR]='' [EPOCHS]='' [GLOBAL_BATCH_SIZE]=256
    [LORA_RANK]=16 [LORA_ALPHA]=64 [LORA_TARGETS]=all-linear
    [LOADERS]=4 [LOGGING_STEPS]=5 [REPORT_TO]=tensorboard [SWITCHES]='--bf16 --tf32 --auto'
    [PREPROCESS]=$((cpus < 128 ? (cpus + 3) / 4 : 32)))         # processes that decode audio
source "$here/train_tts.sh"
