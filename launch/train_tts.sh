#!/usr/bin/env bash
# Train Higgs-Audio V2 on one node or many; arguments go to train_v2_ddp.py.
#
#   sbatch launch/train_tts.sh --train_data_file train.json --output_dir out ...   2 nodes x 8 GPUs; or sbatch --nodes=1
#   bash launch/train_tts.sh --train_data_file train.json --output_dir out ...     this machine, all its GPUs
#
# Settings - VENV, NPROC_PER_NODE, DRY_RUN=1 ... - signals and requeueing are those of slurm.sh, which this one calls.
#
#SBATCH --job-name=train_tts
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#SBATCH --output=%x-%j.out
set -euo pipefail
export LAUNCHER=train_tts

repo=${REPO:-$(dirname "${BASH_SOURCE[0]}")/..}     # sbatch runs a copy of this file; Slurm knows the original
[ -n "${REPO:-}" ] || [ -e "$repo/launch/env.sh" ] || repo=$(cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "${SLURM_JOB_ID:-0}" | sed -n 's|^ *Command=\(.*\)launch/[a-z0-9_]*\.sh.*|\1.|p')") || repo=''
[ -e "$repo/launch/env.sh" ] || { echo "$LAUNCHER: error: no launch/env.sh in '$repo'; set REPO" >&2; exit 1; }
# shellcheck source=launch/env.sh
source "$repo/launch/env.sh"

export TRAINER=${TRAINER:-$REPO/train_v2_ddp.py}        # the script that torchrun starts
if [ -z "${VENV:-}${CONDA_ENV:-}" ] && has_conda_env tts_env; then export CONDA_ENV=tts_env; fi

exec bash "$REPO/launch/slurm.sh" "$@"
