#!/usr/bin/env bash
# What is measured on one GPU, in five parts that each end within 10 minutes on a cold machine.
#
#   bash bench/gpu.sh 1     # facts that choose code, and the tests of kernels on the GPU
#   bash bench/gpu.sh 2     # the speech trainer's step, eager and compiled: time, profile, peak
#   bash bench/gpu.sh 3     # block diffusion
#   bash bench/gpu.sh 4     # chats; then transformers' Trainer beside ours
#   bash bench/gpu.sh 5     # compiled layers whose products Inductor may fuse with what follows them
#   DRY_RUN=1 bash bench/gpu.sh 1       # print the commands
#
# Each command has its time, and what it leaves unused those behind it may use. All write what they
# know as they go, to RESULTS; the part ends with one archive of it, TAR. A command that fails does
# not stop the others; in the end those that failed are named and the exit status is 1.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PART=${1:-}
PYTHON=${PYTHON:-$(command -v python || command -v python3)}    # with torch for CUDA
RESULTS=${RESULTS:-$repo/bench/results}
TAR=${TAR:-$RESULTS/gpu-$PART.tar}
SHAPES=${SHAPES:-}              # other sizes than the true ones: "speech blocks chats"
KILL_S=${KILL_S:-5}             # seconds that a command gets to end after its time
SCALE=${SCALE:-100}             # of each time, %
DRY_RUN=${DRY_RUN:-0}           # 1: print the commands, end

die() { echo "error: gpu.sh: $*" >&2; exit 1; }
[[ $PART =~ ^[1-5]$ ]] || die "which part: 1, 2, 3, 4 or 5"
cd "$repo"
[ "$DRY_RUN" = 1 ] || [ -n "$SHAPES" ] ||
    "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    die "$PYTHON finds no GPU (torch.cuda.is_available()); set PYTHON, or DRY_RUN=1"
read -r speech blocks chats <<<"$SHAPES" || true
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0} PYTHONUNBUFFERED=1

failed=() planned=0 began=$SECONDS
run() {         # run SECONDS COMMAND...
    local limit=$(($1 * SCALE / 100)) name="${*:3}" status=0 start=$SECONDS
    planned=$((planned + limit))
    shift
    if [ "$DRY_RUN" = 1 ]; then
        printf '%q ' timeout -k "$KILL_S" "$limit" "$@"
        echo
        return
    fi
    limit=$((planned - (SECONDS - began)))
    if [ "$limit" -lt 1 ]; then limit=1; fi     # 0 would be no limit
    echo "== $name, at most $limit s"
    # a process group of its own, as timeout makes one, and here its number is known
    setsid timeout -k "$KILL_S" "$limit" "$@" &
    local group=$!
    wait "$group" || status=$?
    kill -KILL -- "-$group" 2>/dev/null || true     # what it started and left
    case $status in
    0) echo "== $name: done in $((SECONDS - start)) s" ;;
    124 | 137) failed+=("$name (after $limit s)") ;;
    *) failed+=("$name (status $status)") ;;
    esac
}
profile() {     # profile SECONDS NAME SHAPE [FLAG...]
    run "$1" "$PYTHON" bench/profile_step.py "$2" ${3:+--shape "$3"} "${@:4}" \
        --results_dir "$RESULTS"
}
speed() {       # speed SECONDS NAME SHAPE [FLAG...]
    run "$1" "$PYTHON" bench/speed.py "$2" ${3:+--shape "$3"} --rounds 1 "${@:4}" \
        --results_dir "$RESULTS"
}

mkdir -p "$RESULTS"
case $PART in
1)
    run 240 "$PYTHON" bench/gpu_facts.py ${SHAPES:+--shape tiny} --results_dir "$RESULTS"
    run 300 env TEST_DEVICE=cuda "$PYTHON" -m pytest -q -x tests/speech/test_v2.py \
        tests/common/test_loading.py tests/common/test_float8.py -k gpu
    ;;
2)
    profile 240 speech "$speech" --lora
    profile 300 speech "$speech" --lora --compile
    ;;
3)
    profile 120 blocks "$blocks"
    profile 150 blocks "$blocks" --compile
    speed 280 blocks "$blocks" --ways "ours, compiled" "ours, one problem a row" minimal
    ;;
4)
    profile 120 chats "$chats" --lora
    speed 210 chats "$chats" --lora --ways "ours, packed" Trainer "Trainer, no padding"
    speed 220 speech "$speech" --lora --ways "ours, compiled" Trainer
    ;;
5)
    # torch tries each product with its own kernels and with the library's, and takes the fastest
    export TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1
    RESULTS=$RESULTS/autotuned      # beside those of the parts before
    mkdir -p "$RESULTS"
    profile 240 blocks "$blocks" --compile
    profile 300 speech "$speech" --lora --compile
    ;;
esac
if [ "$DRY_RUN" = 1 ]; then exit; fi

tar -cf "$TAR" -C "$RESULTS" --exclude '*.tar' .
echo "wrote $TAR"
if [ ${#failed[@]} -gt 0 ]; then
    printf -v list '%s, ' "${failed[@]}"
    die "failed: ${list%, }"
fi
