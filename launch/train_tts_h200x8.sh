#!/usr/bin/env bash
# Train Higgs-Audio V2 on one node of 8 H200: train_tts.sh with other defaults. --auto fits packs to
# the GPUs; BATCH_SIZE=4 has samples instead. Arguments go to train_v2_ddp.py.
#
#   TRAIN_DATA=train.json OUTPUT_DIR=out sbatch launch/train_tts_h200x8.sh     or bash
#
#SBATCH --job-name=train_tts_h200x8 --output=%x-%j.out --open-mode=append
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --mem=0 --time=24:00:00 --requeue --signal=B:USR1@600
set -euo pipefail
export LAUNCHER=train_tts_h200x8

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(scontrol show job \
    "${SLURM_JOB_ID:-0}" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")" 2>/dev/null) ||
    { echo "$LAUNCHER: error: env.sh not found: sbatch FILE, not sbatch < FILE" >&2; exit 1; }
source "$here/env.sh"

declare -A defaults=(           # empty: the trainer's own
    [OUTPUT_DIR]=./output [LR]='' [EPOCHS]=''
    [GLOBAL_BATCH_SIZE]=256     # about, where packs are fitted
    [LORA_RANK]=16 [LORA_ALPHA]=64 [LORA_TARGETS]=all-linear
    [LOADERS]=4 [LOGGING_STEPS]=5 [REPORT_TO]=tensorboard [SWITCHES]='--bf16 --tf32 --auto')
cpus=$(count_cpus)      # 32 decode audio, fewer where there are fewer than 128
defaults[PREPROCESS]=$((cpus < 128 ? (cpus + 3) / 4 : 32))
source "$here/train_tts.sh"
