#!/usr/bin/env bash
# The whole job on a tiny Higgs TTS 3, offline: all weights of a random model learn a few
# synthesised clips on 2 processes, with checkpoints, spoken samples and one resume, until each
# training text ends by itself. Exit status 0 only if that is so and the training loss fell. Needs
# no GPU; uses them when there are some.
set -euo pipefail

OUT=${OUT:-demo_out}          # everything is written below this folder
STEPS=${STEPS:-160}           # optimizer steps; the run stops half way and resumes once
CLIPS=${CLIPS:-16}            # synthesised clips
SPEAKERS=${SPEAKERS:-4}       # voices that share the clips, each at least 2
SAMPLE_SECONDS=${SAMPLE_SECONDS:-4}             # longest sample while it trains
RANKS=${RANKS:-}              # processes that train (default: 1 on a machine with one GPU, else 2)

here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/env.sh
source "$here/env.sh"
# shellcheck source=launch/setup.sh
source "$REPO/launch/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

ranks=${RANKS:-$(python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')}
mkdir -p "$OUT"
run=$(mktemp -d "$OUT/run-XXXX")
tiny=$OUT/tiny3-$CLIPS-$SPEAKERS
if [ ! -e "$tiny/complete" ]; then
    python speech/demo/make_tiny.py "$tiny" --clips "$CLIPS" --speakers "$SPEAKERS" --higgs3
    touch "$tiny/complete"
fi

printf '%s\n' "The moon rose slowly over the harbour." \
    "Could you pass me the blue notebook?" >"$run/prompts.txt"

train() {
    torchrun "${one_machine[@]}" --nproc-per-node="$ranks" train_v2_ddp.py \
        --model_path "$tiny/model" --audio_tokenizer_path "$tiny/codec" \
        --train_data_file "$tiny/train.json" --code_cache "$OUT/codes" \
        --output_dir "$run" --logging_dir "$OUT/tensorboard" --disable_eval \
        --learning_rate 3e-3 --lr_scheduler constant --warmup_steps 10 \
        --per_device_train_batch_size 4 --eval_steps $((STEPS / 4)) --save_steps $((STEPS / 4)) \
        --sample_prompts "$run/prompts.txt" --sample_seconds "$SAMPLE_SECONDS" \
        --logging_steps 10 --num_workers 1 "$@"
}

echo "== training to step $((STEPS / 2))"
train --max_steps $((STEPS / 2))
echo "== the same command again, to step $STEPS: it resumes from the newest checkpoint"
train --max_steps "$STEPS"

echo "== speaking with the checkpoint, by the prompts of the training data"
python speech/generate_tts.py --model_path "$run/checkpoint-$STEPS" \
    --audio_tokenizer_path "$tiny/codec" --prompts "$tiny/train.json" \
    --max_seconds 15 --batch_size "$CLIPS" --output_dir "$run/spoken"

echo "== result"
status=0
python common/report.py "$run" --samples "$run/spoken" --check_fell || status=$?
cut_off=$(grep -L '"ended_by": "eos"' "$run"/spoken/*.json) || true
echo "checkpoint:   $run/checkpoint-$STEPS"
if [ -n "$cut_off" ]; then
    echo "error: did not end by themselves: $cut_off" >&2
    exit 1
fi
echo "all $CLIPS training texts end by themselves"
exit $status
