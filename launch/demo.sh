#!/usr/bin/env bash
# The whole main job on a tiny model, offline: set-up, speech, LoRA fine-tuning on 2 processes, validation with spoken
# samples, checkpoints, one resume, speech from the adapter, a page to look at and listen to. Exit status 0 only if the
# training loss fell. Needs no GPU; uses them when there are some.
#   MODEL=higgs3 bash launch/demo.sh    Higgs TTS 3: all weights of a random model; each training text must end by itself
set -euo pipefail

OUT=${OUT:-demo_out}          # everything is written below this folder
STEPS=${STEPS:-160}           # optimizer steps; the run stops half way and resumes once
MODEL=${MODEL:-v2}            # v2: Higgs-Audio V2; higgs3: Higgs TTS 3
CLIPS=${CLIPS:-$(if [ "$MODEL" = higgs3 ]; then echo 16; else echo 48; fi)}      # synthesised clips

made=()
method=(--use_lora --lora_target_modules all-linear --learning_rate 5e-3 --validation_split 0.1)
tiny=$OUT/tiny-$CLIPS
case $MODEL in
    v2) ;;
    higgs3) made=(--higgs3) method=(--learning_rate 3e-3 --disable_eval) tiny=$OUT/tiny3-$CLIPS ;;
    *) echo "demo: MODEL=$MODEL: v2 or higgs3" >&2; exit 1 ;;
esac

here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/env.sh
source "$here/env.sh"
# shellcheck source=launch/setup.sh
source "$REPO/launch/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus == 1 ? 1 : 2))
mkdir -p "$OUT"
run=$(mktemp -d "$OUT/run-XXXX")
if [ ! -e "$tiny/complete" ]; then
    python speech/make_tiny.py "$tiny" --clips "$CLIPS" "${made[@]}"
    touch "$tiny/complete"
fi

printf '%s\n' "The moon rose slowly over the harbour." "Could you pass me the blue notebook?" >"$run/prompts.txt"

train() {
    torchrun "${one_machine[@]}" --nproc-per-node="$ranks" train_v2_ddp.py \
        --model_path "$tiny/model" --audio_tokenizer_path "$tiny/codec" \
        --train_data_file "$tiny/train.json" --code_cache "$OUT/codes" \
        --output_dir "$run" --logging_dir "$OUT/tensorboard" \
        "${method[@]}" --lr_scheduler constant --warmup_steps 10 \
        --per_device_train_batch_size 4 --eval_steps $((STEPS / 4)) --save_steps $((STEPS / 4)) \
        --sample_prompts "$run/prompts.txt" --sample_seconds 4 --logging_steps 10 --num_workers 1 "$@"
}

echo "== training to step $((STEPS / 2))"
train --max_steps $((STEPS / 2))
echo "== the same command again, to step $STEPS: it resumes from the newest checkpoint"
train --max_steps "$STEPS"

echo "== speaking with the checkpoint"
speaking=(--model_path "$tiny/model" --adapter "$run/checkpoint-$STEPS" --prompts "$run/prompts.txt" --max_seconds 4)
if [ "$MODEL" = higgs3 ]; then      # what it has learnt, by the prompts of the training data
    speaking=(--model_path "$run/checkpoint-$STEPS" --prompts "$tiny/train.json" --max_seconds 15 --batch_size "$CLIPS")
fi
python speech/generate_tts.py "${speaking[@]}" --audio_tokenizer_path "$tiny/codec" --output_dir "$run/spoken"

echo "== result"
status=0
python common/report.py "$run" --samples "$run/spoken" --check_fell || status=$?
if [ "$MODEL" = higgs3 ]; then
    cut_off=$(grep -L '"ended_by": "eos"' "$run"/spoken/*.json) || true
    echo "checkpoint:   $run/checkpoint-$STEPS"
    if [ -n "$cut_off" ]; then
        echo "error: did not end by themselves: $cut_off" >&2
        exit 1
    fi
    echo "all $CLIPS training texts end by themselves"
    exit $status
fi
cat <<END
adapter:      $run/checkpoint-$STEPS   (PeftModel.from_pretrained loads it)
metrics:      $run/metrics.jsonl
TensorBoard:  tensorboard --logdir $OUT/tensorboard
On real weights (8 GPUs, your own train.json):
  torchrun --nproc_per_node=8 train_v2_ddp.py --model_path bosonai/higgs-audio-v2-generation-3B-base --audio_tokenizer_path bosonai/higgs-audio-v2-tokenizer --train_data_file train.json --output_dir ./out --bf16 --use_lora
END
exit $status
