#!/usr/bin/env bash
# The main job in small, offline: a tiny base that speaks in one voice (launch/voice) learns another
# voice by LoRA on 2 processes, with validation and spoken samples; one of the processes is killed
# half way, and the same command goes on from the last checkpoint. Then base and adapter speak
# sentences drawn anew, in no training text, and a recogniser that has nothing to do with the
# training listens. Exit status 0 only if it understands, and hears more than the new voice's code
# alone would give. Needs no GPU; uses them when there.
#
# MODEL=higgs3 bash launch/demo.sh has a tiny random Higgs TTS 3 instead: all its weights learn a
# few synthesised clips, with one resume, until each training text ends by itself. Exit status 0
# only if that is so and the training loss fell.
set -euo pipefail

MODEL=${MODEL:-v2}            # v2 or higgs3
OUT=${OUT:-demo_out}          # everything is written below this folder
STEPS=${STEPS:-$([ "$MODEL" = v2 ] && echo 600 || echo 160)}    # optimizer steps
RANKS=${RANKS:-}  # that train: 1, 2, 4, 8 or 16 (default: 1 on one GPU, else 2)
# of v2
DATA=${DATA:-launch/voice/train.json}           # clips to learn from
SENTENCES=${SENTENCES:-240}  # to be judged by; drawn by the seed, new to launch/voice
SEED=${SEED:-42}  # of sentences, adapter, order, held-out clips and what is drawn while speaking
# of higgs3
CLIPS=${CLIPS:-16}            # synthesised clips
SPEAKERS=${SPEAKERS:-4}       # voices that share the clips, each at least 2
SAMPLE_SECONDS=${SAMPLE_SECONDS:-4}             # longest sample while it trains

# shellcheck disable=SC2034     # env.sh's messages begin with it
LAUNCHER=demo
# shellcheck source=launch/env.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
known=(MODEL OUT STEPS RANKS DATA SENTENCES SEED CLIPS SPEAKERS SAMPLE_SECONDS)
known_settings
case $MODEL in v2 | higgs3) ;; *) die "MODEL=$MODEL: v2 or higgs3" ;; esac
# shellcheck source=launch/setup.sh
source "$REPO/launch/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

ranks=${RANKS:-$(python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')}
half=$((STEPS / 2))
mkdir -p "$OUT"
run=$(mktemp -d "$OUT/run-XXXX")

# -- Higgs TTS 3 -----------------------------------------------------------------------------------

train_higgs3() {        # STEPS
    torchrun "${one_machine[@]}" --nproc-per-node="$ranks" train_v2_ddp.py \
        --model_path "$tiny/model" --audio_tokenizer_path "$tiny/codec" \
        --train_data_file "$tiny/train.json" --code_cache "$OUT/codes" \
        --output_dir "$run" --logging_dir "$OUT/tensorboard" --disable_eval --max_steps "$1" \
        --learning_rate 3e-3 --lr_scheduler constant --warmup_steps 10 \
        --per_device_train_batch_size 4 --eval_steps $((half / 2)) --save_steps $((half / 2)) \
        --sample_prompts "$run/prompts.txt" --sample_seconds "$SAMPLE_SECONDS" \
        --logging_steps 10 --num_workers 1
}

if [ "$MODEL" = higgs3 ]; then
    tiny=$OUT/tiny3-$CLIPS-$SPEAKERS
    if [ ! -e "$tiny/complete" ]; then
        python speech/demo/make_tiny.py "$tiny" --clips "$CLIPS" --speakers "$SPEAKERS" --higgs3
        touch "$tiny/complete"
    fi
    printf '%s\n' "The moon rose slowly over the harbour." \
        "Could you pass me the blue notebook?" >"$run/prompts.txt"
    echo "== training to step $half"
    train_higgs3 "$half"
    echo "== the same command again, to step $STEPS: it resumes from the newest checkpoint"
    train_higgs3 "$STEPS"
    echo "== speaking with the checkpoint, by the prompts of the training data"
    python speech/generate_tts.py --model_path "$run/checkpoint-$STEPS" \
        --audio_tokenizer_path "$tiny/codec" --prompts "$tiny/train.json" \
        --max_seconds 15 --batch_size "$CLIPS" --output_dir "$run/spoken"
    echo "== result"
    status=0
    python common/report.py "$run" --samples "$run/spoken" --check_fell || status=$?
    cut_off=$(grep -L '"ended_by": "eos"' "$run"/spoken/*.json) || true
    echo "checkpoint:   $run/checkpoint-$STEPS"
    [ -z "$cut_off" ] || die "did not end by themselves: $cut_off"
    echo "all $CLIPS training texts end by themselves"
    exit $status
fi

# -- Higgs-Audio V2 --------------------------------------------------------------------------------

voice=launch/voice
targets=q_proj,k_proj,v_proj,o_proj,audio_lm_head
targets+=,audio_mlp.gate_proj,audio_mlp.up_proj,audio_mlp.down_proj

train() {       # in a subshell: exec makes its process torchrun's
    exec torchrun "${one_machine[@]}" --nproc-per-node="$ranks" train_v2_ddp.py \
        --model_path "$voice/model" --audio_tokenizer_path "$voice/codec" \
        --train_data_file "$DATA" --code_cache "$OUT/codes" \
        --output_dir "$run" --logging_dir "$OUT/tensorboard" \
        --use_lora --lora_rank 32 --lora_alpha 64 --lora_dropout 0.1 \
        --lora_target_modules "$targets" --learning_rate 3e-3 --warmup_steps 20 --weight_decay 0 \
        --adam_beta2 0.99 --text_loss_weight 0 --per_device_train_batch_size $((16 / ranks)) \
        --max_steps "$STEPS" --num_workers 0 --logging_steps 25 \
        --validation_split 0.05 --per_device_eval_batch_size 8 \
        --eval_steps $((half / 2)) --save_steps $((half / 2)) \
        --sample_prompts "$run/prompts.txt" --sample_seconds 4 --seed "$SEED"
}

speak() {       # speak NAME [flags]: the sentences
    python speech/generate_tts.py --model_path "$voice/model" \
        --audio_tokenizer_path "$voice/codec" --prompts "$run/sentences.txt" \
        --temperature 0.3 --ras_window 0 --max_seconds 6 --batch_size "$SENTENCES" \
        --save_codes --output_dir "$run/$1" --seed "$SEED" "${@:2}"
}

printf '%s\n' "seven four two." "six one two four seven." >"$run/prompts.txt"
python speech/demo/draw_sentences.py "$SENTENCES" --seed "$SEED" >"$run/sentences.txt"

echo "== training to step $STEPS; one process is killed after step $half"
(train) 2>"$run/killed.txt" &
while kill -0 $! 2>/dev/null && [ ! -e "$run/checkpoint-$half/manifest.json" ]; do sleep 0.2; done
victim=$(grep -ls "^PPid:[[:space:]]*$!\$" /proc/[0-9]*/status | head -n 1 | cut -d / -f 3) || true
[ -n "$victim" ] || { cat "$run/killed.txt" >&2; die "training ended before step $half"; }
kill -KILL "$victim"
if wait $!; then die "training ended well without one of its processes"; fi
echo "training ended with an error, as it should: $run/killed.txt"

echo "== the same command again: it resumes from the newest checkpoint"
(train)

echo "== the adapter speaks, and beside it the base"
speak before >"$run/before.txt" &
speak after --adapter "$run/checkpoint-$STEPS"
wait $!

echo "== result"
status=0
python speech/demo/judge_demo.py "$run/before" "$run/after" --voice_dir "$voice" || status=$?
python common/report.py "$run" --samples "$run/before" "$run/after" || status=$?
cat <<END
listen to:    $run/before/*.wav, $run/after/*.wav
adapter:      $run/checkpoint-$STEPS   (PeftModel.from_pretrained loads it)
metrics:      $run/metrics.jsonl
TensorBoard:  tensorboard --logdir $OUT/tensorboard
END
exit $status
