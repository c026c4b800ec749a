#!/usr/bin/env bash
# Teacher labels on one node of 8 GPUs: 8 / (TP x PP) instances of distill/create_data.py side by
# side, one shard each.
#
#   bash launch/create_data_h100x8.sh [INPUT [OUTPUT [TP]]] [flags of distill/create_data.py]
#   TP=1 suits a 30B-A3B teacher in bf16 on 80 GB as well; 4 is the default; 2 and 8 work alike
#
# DRY_RUN=1 checks, prints the commands and ends. Ctrl-C, SIGTERM or a dying instance leave no
# process and lose nothing that was finished: the same command goes on, also with another TP. OUTPUT
# appears when every line is finished.
set -euo pipefail
LAUNCHER=create_data_h100x8

allocator=${PYTORCH_ALLOC_CONF:-}
# shellcheck source=launch/env.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
# vLLM's all-reduce (TP > 1) cannot share such memory
if [ -z "$allocator" ]; then unset PYTORCH_ALLOC_CONF; fi

# not all of known_settings: the student's, of one command for both, are in the environment too
known=(MODEL PP MAX_MODEL_LEN ENGINE GPUS RESTART_S STOP_S LOG_EVERY_S)
misspelt

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Instruct-2507}    # the teacher: folder or hub name
PP=${PP:-1}                             # pipeline stages; TP x PP GPUs an instance
MAX_MODEL_LEN=${MAX_MODEL_LEN:-8192}  # tokens; the teacher's own 262,144 would not fit
ENGINE=${ENGINE:-vllm}                  # of distill/create_data.py
GPUS=${GPUS:-$(count_gpus)}             # GPUs to use
VENV=${VENV:-}  # a virtual environment; none: the one this shell is in; default: env.sh
CONDA_ENV=${CONDA_ENV:-}                # or a conda environment
MAX_RESTARTS=${MAX_RESTARTS:-2}         # of each instance that fails
RESTART_S=${RESTART_S:-10}              # seconds before that
STOP_S=${STOP_S:-60}                    # seconds that instances get to end; then they are killed
LOG_EVERY_S=${LOG_EVERY_S:-30}          # seconds between looks at how far they are
DRY_RUN=${DRY_RUN:-0}                   # 1: check, print the commands, end

# -- checks ----------------------------------------------------------------------------------------

input=../tinker-cookbook/example-data/multilingual.txt      # defaults
output=./data/prompt_distillation_lang.jsonl tp=4
if [ $# -gt 0 ] && [[ $1 != -* ]]; then input=$1; shift; fi
if [ $# -gt 0 ] && [[ $1 != -* ]]; then output=$1; shift; fi
if [ $# -gt 0 ] && [[ $1 != -* ]]; then tp=$1; shift; fi
case $tp in 1 | 2 | 4 | 8) ;; *) die "TP is '$tp': 1, 2, 4 or 8" ;; esac
[[ $PP =~ ^[1-9][0-9]*$ ]] || die "PP=$PP: a number from 1 on"
[[ $GPUS =~ ^[1-9][0-9]*$ ]] || die "$HOSTNAME has $GPUS GPUs; set GPUS"
[ $((GPUS % (tp * PP))) = 0 ] ||
    die "$GPUS GPUs cannot be shared out to instances of TP $tp x PP $PP (GPUS)"
need_file "$input" INPUT
engine=()
if [ "$ENGINE" = vllm ]; then engine=(vllm); fi
use_environment python torch "${engine[@]}"

instances=$((GPUS / (tp * PP)))
devices=()
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"; fi
for ((i = ${#devices[@]}; i < GPUS; i++)); do devices+=("$i"); done
slice() { local IFS=,; echo "${devices[*]:$1 * tp * PP:tp * PP}"; }     # the GPUs of an instance
command=(python "$REPO/distill/create_data.py" --input_file "$input" --output_file "$output"
    --model_name "$MODEL" --engine "$ENGINE" --tensor_parallel_size "$tp"
    --pipeline_parallel_size "$PP" --max_model_len "$MAX_MODEL_LEN" "$@")

"${command[@]}" --dry_run || exit $?    # one error instead of one from each instance
if [ "$DRY_RUN" = 1 ]; then
    for ((i = 0; i < instances; i++)); do
        shown "CUDA_VISIBLE_DEVICES=$(slice $i)" "${command[@]}" --shard "$i/$instances"
        echo
    done
    exit
fi

# -- instances -------------------------------------------------------------------------------------

# Each is the leader of a process group: Ctrl-C comes to this shell alone. Engines start processes
# of their own, so what belongs to an instance is known by a mark in its environment, or by its
# group: vLLM's processes empty their environment.
mark=LABEL_INSTANCE=$$-$RANDOM$RANDOM
logs=$output.work
pids=() groups=() tries=() failed=() running=0 stopping='' signals=0
ask_all() { for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done; }
end_instances() {       # NUMBER...: kill what is left of them
    local i
    for i in "$@"; do
        if [ -n "${groups[i]:-}" ]; then kill -KILL -- "-${groups[i]}" 2>/dev/null || true; fi
        unset "groups[$i]"
        end_all "$mark\.$i"
    done
}
# shellcheck disable=SC2317,SC2329     # guard calls it
end_orphans() {
    ask_all
    for ((s = 0; s < STOP_S; s++)); do [ -n "$(left "$mark\.[0-9]+")" ] || break; sleep 1; done
    end_instances "${!groups[@]}"
}

start() {
    set -m
    env "$mark.$1" CUDA_VISIBLE_DEVICES="$(slice "$1")" "${command[@]}" --shard "$1/$instances" \
        </dev/null >>"$logs/instance-$1.log" 2>&1 &
    pids[$1]=$! groups[$1]=$!
    set +m
    running=$((running + 1))
}

signalled() { stopping=${stopping:-$1} signals=$((signals + 1)); }
trap 'signalled 2' INT
trap 'signalled 15' TERM
trap 'signalled 1' HUP

mkdir -p "$logs"
for ((i = 0; i < instances; i++)); do tries[i]=0; start $i; done
say "$instances instances of TP $tp x PP $PP on ${devices[*]:0:GPUS}; logs $logs/instance-*.log"
guard "$mark\.[0-9]+" 0 end_orphans

looked=$SECONDS asked=''
while [ $running -gt 0 ]; do
    sleep 0.3 || true       # Ctrl-C ends it as well
    if [ -n "$stopping" ] && [ -z "$asked" ]; then
        say "stopping; finished lines are kept, the same command goes on"
        asked=$SECONDS
        ask_all
    fi
    if [ -n "$asked" ] && { [ $signals -gt 1 ] || [ $((SECONDS - asked)) -ge "$STOP_S" ]; }; then
        end_instances "${!pids[@]}"
    fi
    for i in "${!pids[@]}"; do
        if kill -0 "${pids[i]}" 2>/dev/null; then continue; fi
        status=0
        wait "${pids[i]}" || status=$?
        unset "pids[$i]"
        running=$((running - 1))
        end_instances "$i"      # what a killed instance left would keep its GPUs
        if [ $status = 0 ] || [ -n "$stopping" ]; then continue; fi
        say "instance $i ended with status $status: $(tail -n 1 "$logs/instance-$i.log")"
        if [ "${tries[i]}" -ge "$MAX_RESTARTS" ]; then failed+=("$i"); continue; fi
        tries[i]=$((tries[i] + 1))
        say "instance $i starts again in $RESTART_S s (${tries[i]} of $MAX_RESTARTS)"
        sleep "$RESTART_S" || true
        if [ -z "$stopping" ]; then start "$i"; fi
    done
    if [ $((SECONDS - looked)) -ge "$LOG_EVERY_S" ]; then
        looked=$SECONDS
        for i in "${!pids[@]}"; do
            say "instance $i: $(grep '^lines ' "$logs/instance-$i.log" | tail -n 1)"
        done
    fi
done
kill -KILL -- "-$guard"

if [ -n "$stopping" ]; then exit $((128 + stopping)); fi
[ ${#failed[@]} = 0 ] ||
    die "instances ${failed[*]} failed; finished lines are kept, the same command goes on"
exec "${command[@]}"        # all lines are finished: merges them, without a teacher
