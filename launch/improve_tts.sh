#!/usr/bin/env bash
# Learning from own speech, on one machine: the model speaks texts several times over, a recogniser
# picks the best takes, and an adapter learns them through the very codes that were spoken. Each
# round speaks with the adapter of the round before, and its own adapter begins at the base.
#
#   MODEL=bosonai/higgs-audio-v2-generation-3B-base CODEC=bosonai/higgs-audio-v2-tokenizer \
#       PROMPTS=texts.txt SPEAK_FLAGS="--asr_model openai/whisper-small --language en" \
#       bash launch/improve_tts.sh OUT --bf16 --keep others.json
#
# The arguments behind OUT go to train_v2_ddp.py. OUT/spoken-N/best.jsonl has the takes, and
# OUT/adapter-N/checkpoint-* what learnt them. A step that is finished, by the checksum of what it
# made, is skipped: the same command goes on. DRY_RUN=1 prints the commands. Judge by texts that are
# not in PROMPTS, and by another recogniser: the one that picks is the one that is flattered.
set -euo pipefail
# shellcheck disable=SC2034     # env.sh's messages begin with it
LAUNCHER=improve_tts

# shellcheck source=launch/env.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
known=(MODEL CODEC PROMPTS ADAPTER RECORDINGS SPEAK_FLAGS ROUNDS TAKES MAX_CER SEED NPROC_PER_NODE)
known_settings

MODEL=${MODEL:-bosonai/higgs-audio-v2-generation-3B-base}   # folder or hub name
CODEC=${CODEC:-}                # audio tokenizer; Higgs TTS 3 has its own
PROMPTS=${PROMPTS:-}            # texts, or ChatML with the voices to take
ADAPTER=${ADAPTER:-}            # speaks in the first round; default: the base does
RECORDINGS=${RECORDINGS:-}      # data of the trainer to learn beside the takes, PATH[:WEIGHT] ...
SPEAK_FLAGS=${SPEAK_FLAGS:-}    # of generate_tts.py: --asr_model or --asr_command, --temperature
ROUNDS=${ROUNDS:-1}
TAKES=${TAKES:-4}               # of each text, at most
MAX_CER=${MAX_CER:-0.1}         # character errors of a take that is learnt, at most
SEED=${SEED:-42}                # of the draws, of adapters and of their data's order
NPROC_PER_NODE=${NPROC_PER_NODE:-$(count_gpus)}             # processes; default: one a GPU

[ $# -gt 0 ] && [[ $1 != -* ]] || die "give the folder to work in: bash launch/improve_tts.sh OUT"
OUT=$1
shift
need_file "$PROMPTS" PROMPTS
use_environment torchrun torch transformers
# shellcheck source=launch/stages.sh
source "$REPO/launch/stages.sh"

eval "speak_flags=($SPEAK_FLAGS)"       # quotes in it count
read -ra recordings <<<"$RECORDINGS"
run=(torchrun "${one_machine[@]}" --nproc-per-node="$((NPROC_PER_NODE > 0 ? NPROC_PER_NODE : 1))")
of=(--model_path "$MODEL" ${CODEC:+--audio_tokenizer_path "$CODEC"})
for ((round = 1; round <= ROUNDS; round++)); do
    step "speak-$round" "$OUT/spoken-$round/best.jsonl" "${run[@]}" "$REPO/speech/generate_tts.py" \
        "${of[@]}" ${ADAPTER:+--adapter "$ADAPTER"} --prompts "$PROMPTS" --best_of "$TAKES" \
        --max_cer "$MAX_CER" --seed "$((SEED + round))" --overwrite \
        --output_dir "$OUT/spoken-$round" "${speak_flags[@]}"
    step "train-$round" "$OUT/adapter-$round/checkpoint-*/manifest.json" "${run[@]}" \
        "$REPO/train_v2_ddp.py" "${of[@]}" --train_data_file "$made" "${recordings[@]}" \
        --use_lora --seed "$SEED" --code_cache "$OUT/codes" --output_dir "$OUT/adapter-$round" "$@"
    ADAPTER=${made%/manifest.json}
done
echo "done       $ADAPTER"
