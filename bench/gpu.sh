#!/usr/bin/env bash
# Everything that is measured on one GPU, in less than 9 minutes: speed beside what people use, and whether it is right.
#
#   bash bench/gpu.sh               # leaves bench/results/*.json and profile-*.txt; then python bench/table.py
#   DRY_RUN=1 bash bench/gpu.sh     # print the commands
#
# Each part has its own time limit, and what it leaves unused the parts behind it may use; facts of the GPU come first,
# then the most telling. All write what they know after every round, to RESULTS, and a part that fails does not stop the
# others; in the end those that failed are named and the exit status is 1. A part ends with all processes that it
# started, and the next one begins when the GPU's memory is free again.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$(command -v python || command -v python3)}     # of an environment with torch for CUDA
FACTS_S=${FACTS_S:-45}              # seconds each part may take; together below 9 minutes
PARITY_S=${PARITY_S:-75}
TTS_S=${TTS_S:-110}
SFT_S=${SFT_S:-120}
BLOCK_S=${BLOCK_S:-65}
PROFILE_TTS_S=${PROFILE_TTS_S:-30}
PROFILE_SFT_S=${PROFILE_SFT_S:-20}
PROFILE_BLOCK_S=${PROFILE_BLOCK_S:-20}
KILL_S=${KILL_S:-5}                 # seconds that a part gets to end after its time
FREE_S=${FREE_S:-15}                # seconds that memory of ended processes gets to be free
RESULTS=${RESULTS:-$repo/bench/results}
DRY_RUN=${DRY_RUN:-0}               # 1: print the commands, end

cd "$repo"
if [ "$DRY_RUN" != 1 ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: gpu.sh: $PYTHON finds no GPU (torch.cuda.is_available()); set PYTHON, or DRY_RUN=1 to see the commands" >&2
    exit 1
fi

held() { nvidia-smi -i "$CUDA_VISIBLE_DEVICES" --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1; }   # MiB

wait_until_free() {     # wait_until_free NAME: of a part that ended
    local since=$SECONDS
    while [ -n "$at_first" ] && [ "$(held)" -gt $((at_first + 500)) ]; do
        if [ $((SECONDS - since)) -ge "$FREE_S" ]; then
            failed+=("$1 (left $(($(held) - at_first)) MiB of the GPU's memory in use)")
            return
        fi
        sleep 0.5
    done
}

failed=() planned=0 began=$SECONDS
part() {    # part NAME SECONDS COMMAND...; a word @N of the command: the part's minutes less N seconds
    local name=$1 limit=$2 status=0 start=$SECONDS word command=()
    planned=$((planned + limit))
    shift 2
    if [ "$DRY_RUN" != 1 ]; then limit=$((planned - (SECONDS - began))); fi
    if [ "$limit" -lt 1 ]; then limit=1; fi     # 0 would be no limit
    for word in "$@"; do
        if [[ $word =~ ^@[0-9]+$ ]]; then word=$(awk "BEGIN { printf \"%.2f\", ($limit - ${word#@}) / 60 }"); fi
        command+=("$word")
    done
    if [ "$DRY_RUN" = 1 ]; then
        printf '%q ' timeout -k "$KILL_S" "$limit" "${command[@]}"
        echo
        return
    fi
    echo "== $name, at most $limit s"
    # a process group of its own, as timeout makes one, and here its number is known
    setsid timeout -k "$KILL_S" "$limit" "${command[@]}" &
    local group=$!
    wait "$group" || status=$?
    kill -KILL -- "-$group" 2>/dev/null || true     # what it started and left
    case $status in
        0) echo "== $name: done in $((SECONDS - start)) s" ;;
        124 | 137) failed+=("$name (after $limit s)") ;;
        *) failed+=("$name (status $status)") ;;
    esac
    wait_until_free "$name"
}

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} PYTHONUNBUFFERED=1
mkdir -p "$RESULTS"
before=$(mktemp)
trap 'rm -f "$before"' EXIT
at_first=''     # MiB of the GPU in use, where nvidia-smi says
if [ "$DRY_RUN" != 1 ] && command -v nvidia-smi >/dev/null; then at_first=$(held); fi
part facts "$FACTS_S" "$PYTHON" bench/gpu_facts.py --results_dir "$RESULTS"
part parity "$PARITY_S" env TEST_DEVICE=cuda "$PYTHON" -m pytest -q -x tests/speech/test_v2.py tests/common/test_loading.py tests/common/test_float8.py -k gpu
part speech "$TTS_S" "$PYTHON" bench/tts.py --shapes 3b --methods lora --fast --rounds 2 --results_dir "$RESULTS"
part chat "$SFT_S" "$PYTHON" bench/sft.py --shape qwen3-4b --methods full,lora --parts long --ways 0,1,2,7,8 \
    --rounds 1 --minutes @25 --results_dir "$RESULTS"
part "block diffusion" "$BLOCK_S" "$PYTHON" bench/block_diffusion.py --batches 128 --repeats 3 --minutes @40 \
    --results_dir "$RESULTS"
part "profile of speech" "$PROFILE_TTS_S" "$PYTHON" bench/profile_step.py tts --results_dir "$RESULTS"
part "profile of chat" "$PROFILE_SFT_S" "$PYTHON" bench/profile_step.py sft --results_dir "$RESULTS"
part "profile of block diffusion" "$PROFILE_BLOCK_S" "$PYTHON" bench/profile_step.py block_diffusion \
    --results_dir "$RESULTS"
if [ "$DRY_RUN" = 1 ]; then exit; fi

find "$RESULTS" \( -name '*.json' -o -name 'profile-*.txt' \) -newer "$before" -printf 'wrote %p\n' | sort -u
if [ ${#failed[@]} -gt 0 ]; then
    printf -v list '%s, ' "${failed[@]}"
    echo "error: gpu.sh: failed: ${list%, }" >&2
    exit 1
fi
