#!/usr/bin/env bash
# Train HDP-Diffusion (question -> plan -> execution) on one H200, then answer the test problems:
# train_gsm8k_bd3lm_h200.sh with SYSTEM=hdp. Arguments go to diffusion/train_bd3lm.py.
#
#   TRAIN_DATA=train_hdp.json TEST_DATA=test_hdp.json sbatch launch/train_hdp_diffusion_h200.sh
#   bash launch/train_hdp_diffusion_h200.sh --demo      small, on problems it makes itself; no GPU
#   python diffusion/make_problems.py plans --input train.jsonl --output train_hdp.json     by rule
#SBATCH -J train_hdp_diffusion --output=%x-%j.out --open-mode=append --requeue --signal=B:USR1@300
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=18 --mem=64G --time=24:00:00
set -euo pipefail
export LAUNCHER=train_hdp_diffusion_h200
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")  # sbatch runs a copy; Slurm knows the original
[ -e "$here/env.sh" ] || here=$(exec 2>/dev/null; cd "${SLURM_SUBMIT_DIR:-.}" && realpath "$(
    scontrol show job "$SLURM_JOB_ID" | sed -n "s|^ *Command=\(.*\)/$LAUNCHER\.sh.*|\1|p")") || :
export SYSTEM=hdp       # TRAIN_DATA, TEST_DATA: HDP JSON of question, plan, execution, answer
source "${here:?env.sh not found: sbatch FILE, not sbatch < FILE}/train_gsm8k_bd3lm_h200.sh"
