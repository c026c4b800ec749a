#!/usr/bin/env bash
# The main job in small, offline: a tiny base that speaks in one voice (launch/voice) learns another
# voice by LoRA on 2 processes, with validation and spoken samples. One process is killed half way;
# the same command resumes. Then base and adapter speak new sentences, and an independent recogniser
# judges them. Exit status 0 only if WER is low and the gain is more than the new voice's code alone
# would give. Needs no GPU.
set -euo pipefail
LAUNCHER=demo
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
setting OUT demo_out                    # everything is written below this folder
setting STEPS 600                       # optimizer steps
setting RANKS ''                        # 1, 2, 4, 8 or 16 (default: 1 on one GPU, else 2)
setting DATA launch/voice/train.json    # clips to learn from
setting SENTENCES 240                   # to judge by; drawn by the seed, new to launch/voice
setting SEED 42                         # of sentences, adapter, order, held-out clips, speech
known_settings
source "$REPO/launch/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

ranks=${RANKS:-$(python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')}
half=$((STEPS / 2)) voice=launch/voice
mkdir -p "$OUT"
run=$(mktemp -d "$OUT/run-XXXX")
targets=q_proj,k_proj,v_proj,o_proj,audio_lm_head
targets+=,audio_mlp.gate_proj,audio_mlp.up_proj,audio_mlp.down_proj

train() {       # in a subshell: exec makes its process torchrun's
    exec torchrun "${one_machine[@]}" --nproc-per-node="$ranks" train_v2_ddp.py \
        --model_path "$voice/model" --audio_tokenizer_path "$voice/codec" --seed "$SEED" \
        --train_data_file "$DATA" --code_cache "$OUT/codes" --output_dir "$run" --use_lora \
        --lora_rank 32 --lora_alpha 64 --lora_dropout 0.1 --lora_target_modules "$targets" \
        --learning_rate 3e-3 --warmup_steps 20 --weight_decay 0 --adam_beta2 0.99 \
        --text_loss_weight 0 --per_device_train_batch_size $((16 / ranks)) --num_workers 0 \
        --max_steps "$STEPS" --logging_steps 100 --logging_dir "$OUT/tensorboard" \
        --validation_split 0.05 --per_device_eval_batch_size 8 --eval_steps $((half / 2)) \
        --save_steps $((half / 2)) --sample_prompts "$run/prompts.txt" --sample_seconds 4
}

speak() {       # speak NAME [flags]: the sentences
    python speech/generate_tts.py --model_path "$voice/model" \
        --audio_tokenizer_path "$voice/codec" --prompts "$run/sentences.txt" \
        --temperature 0.3 --ras_window 0 --max_seconds 6 --batch_size "$SENTENCES" \
        --save_codes --output_dir "$run/$1" --seed "$SEED" "${@:2}"
}

printf '%s\n' "seven four two." "six one two four seven." >"$run/prompts.txt"
python launch/judge_demo.py draw "$SENTENCES" --seed "$SEED" >"$run/sentences.txt"
echo "== training to step $STEPS; one process is killed after step $half"
(train) 2>"$run/killed.txt" &
job=$!
while kill -0 $job 2>/dev/null && [ ! -e "$run/checkpoint-$half/manifest.json" ]; do sleep 0.2; done
mapfile -t victims < <(children $job)
[ -n "${victims[0]:-}" ] || { cat "$run/killed.txt" >&2; die "training ended before step $half"; }
kill -KILL "${victims[0]}"
if wait $job; then die "training ended well without one of its processes"; fi
echo "training ended with an error, as it should: $run/killed.txt"
echo "== the same command again: it resumes from the newest checkpoint"
(train)
echo "== the base and the adapter speak"
speak before >"$run/before.txt" &
speak after --adapter "$run/checkpoint-$STEPS" >"$run/after.txt"
wait $!

echo "== result"
status=0
python launch/judge_demo.py judge "$run/before" "$run/after" || status=$?
python core/report.py "$run" --samples "$run/before" "$run/after" || status=$?
echo "listen to:    $run/before/*.wav, $run/after/*.wav
adapter:      $run/checkpoint-$STEPS   (PeftModel.from_pretrained loads it)
TensorBoard:  tensorboard --logdir $OUT/tensorboard"
exit $status
