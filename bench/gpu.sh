#!/usr/bin/env bash
# Everything that is measured on one GPU, in less than 10 minutes: speed beside what people use, and whether it is right.
#
#   bash bench/gpu.sh               # leaves bench/results/*.json; then python bench/table.py
#   DRY_RUN=1 bash bench/gpu.sh     # print the commands
#
# Each part has its own time limit and a part that fails does not stop the others; in the end those that failed are
# named and the exit status is 1.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python}            # of an environment with torch for CUDA
PARITY_S=${PARITY_S:-50}            # seconds each part may take
TTS_S=${TTS_S:-155}
SFT_S=${SFT_S:-150}
BLOCK_S=${BLOCK_S:-125}
MEMORY_S=${MEMORY_S:-90}
KILL_S=${KILL_S:-5}                 # seconds that a part gets to end after its time
RESULTS=${RESULTS:-$repo/bench/results}
DRY_RUN=${DRY_RUN:-0}               # 1: print the commands, end

cd "$repo"
if [ "$DRY_RUN" != 1 ] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "error: gpu.sh: $PYTHON finds no GPU (torch.cuda.is_available()); set PYTHON, or DRY_RUN=1 to see the commands" >&2
    exit 1
fi

failed=()
part() {    # part NAME SECONDS COMMAND...
    local name=$1 limit=$2 status=0 start=$SECONDS
    shift 2
    if [ "$DRY_RUN" = 1 ]; then
        printf '%q ' timeout -k "$KILL_S" "$limit" "$@"
        echo
        return
    fi
    echo "== $name, at most $limit s"
    timeout -k "$KILL_S" "$limit" "$@" || status=$?
    case $status in
        0) echo "== $name: done in $((SECONDS - start)) s" ;;
        124 | 137) failed+=("$name (after $limit s)") ;;
        *) failed+=("$name (status $status)") ;;
    esac
}

minutes() { awk "BEGIN { printf \"%.2f\", ($1) / 60 }"; }   # these parts begin nothing new after that

export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
mkdir -p "$RESULTS"
before=$(mktemp)
trap 'rm -f "$before"' EXIT
part parity "$PARITY_S" env TEST_DEVICE=cuda "$PYTHON" -m pytest -q -x tests/test_higgs.py -k gpu
part speech "$TTS_S" "$PYTHON" bench/tts.py --shapes 3b --methods lora --fast --results_dir "$RESULTS"
part chat "$SFT_S" "$PYTHON" bench/sft.py --shape qwen3-4b --methods full --parts short --rounds 2 \
    --minutes "$(minutes "$SFT_S - 50")" --results_dir "$RESULTS"
part "block diffusion" "$BLOCK_S" "$PYTHON" bench/block_diffusion.py --batches 64,128 --repeats 3 \
    --minutes "$(minutes "$BLOCK_S - 40")" --results_dir "$RESULTS"
part memory "$MEMORY_S" "$PYTHON" bench/memory_3b.py --modes 0 --steps 6 --results_dir "$RESULTS"
if [ "$DRY_RUN" = 1 ]; then exit; fi

find "$RESULTS" -name '*.json' -newer "$before" -printf 'wrote %p\n' | sort -u
if [ ${#failed[@]} -gt 0 ]; then
    printf -v list '%s, ' "${failed[@]}"
    echo "error: gpu.sh: failed: ${list%, }" >&2
    exit 1
fi
