#!/usr/bin/env bash
# Teacher labels on one node of 8 GPUs: 8 / (TP x PP) instances of create_data.py, a shard each.
#
#   bash launch/create_data_h100x8.sh INPUT [OUTPUT [TP]] [flags of distill/create_data.py]
#
# OUTPUT (default: ./data/prompt_distillation_lang.jsonl) appears when every line is finished. TP
# (default: 4) may be 1 for a 30B-A3B teacher in bf16 on 80 GB. DRY_RUN=1 prints the commands. After
# Ctrl-C or an error no finished line is lost: rerun the command to resume, also with another TP.
set -euo pipefail
LAUNCHER=create_data_h100x8
allocator=${PYTORCH_ALLOC_CONF:-}
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
[ -n "$allocator" ] || unset PYTORCH_ALLOC_CONF     # vLLM's all-reduce cannot share such memory
MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Instruct-2507}    # the teacher: folder or hub name
PP=${PP:-1}                             # pipeline stages; TP x PP GPUs an instance
MAX_MODEL_LEN=${MAX_MODEL_LEN:-0}  # tokens of prompt and answer; 0: 32768, or the model's fewer
ENGINE=${ENGINE:-vllm}                  # of distill/create_data.py
GPUS=${GPUS:-$(count_gpus)}             # GPUs to use
MAX_RESTARTS=${MAX_RESTARTS:-2}         # of each instance that fails
RESTART_S=${RESTART_S:-10}              # seconds before that
STOP_S=${STOP_S:-60}                    # seconds that instances get to end; then they are killed
DRY_RUN=${DRY_RUN:-0}                   # 1: check, print the commands, end
known=(MODEL PP MAX_MODEL_LEN ENGINE GPUS RESTART_S STOP_S)
OTHERS='' known_settings                # those of the student may be set for both launchers
given=()
while [ $# -gt 0 ] && [ ${#given[@]} -lt 3 ] && [[ $1 != -* ]]; do given+=("$1"); shift; done
input=${given[0]:-} output=${given[1]:-./data/prompt_distillation_lang.jsonl} tp=${given[2]:-4}
[ -n "$input" ] || die "INPUT is not set: $LAUNCHER.sh INPUT [OUTPUT [TP]], a line each"
[[ $tp = [1248] ]] || die "TP is '$tp': 1, 2, 4 or 8"
need_number PP
[[ $GPUS =~ ^[1-9][0-9]*$ ]] || die "$HOSTNAME has $GPUS GPUs; set GPUS"
((GPUS % (tp * PP) == 0)) || die "$GPUS GPUs cannot be shared out to instances of TP $tp x PP $PP"
need_file "$input" INPUT
use_environment python "$([ "$ENGINE" = vllm ] && echo vllm || echo torch)"
instances=$((GPUS / (tp * PP))) devices=()
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"; fi
for ((i = ${#devices[@]}; i < GPUS; i++)); do devices+=("$i"); done
slice() { local IFS=,; echo "${devices[*]:$1 * tp * PP:tp * PP}"; }     # the GPUs of an instance
command=(python "$REPO/distill/create_data.py" --input_file "$input" --output_file "$output"
    --model_name "$MODEL" --engine "$ENGINE" --tensor_parallel_size "$tp"
    --pipeline_parallel_size "$PP" --max_model_len "$MAX_MODEL_LEN" "$@")
"${command[@]}" --dry_run || exit $?    # one error instead of one from each instance
for ((i = 0; i < instances && DRY_RUN == 1; i++)); do
    shown "CUDA_VISIBLE_DEVICES=$(slice $i)" "${command[@]}" --shard "$i/$instances"
    echo
done
if [ "$DRY_RUN" = 1 ]; then exit; fi
# -- instances -------------------------------------------------------------------------------------
logs=$output.work mark=LABELS=$HOSTNAME-$$ pids=() tries=() failed=() asked='' deadline=0
mkdir -p "$logs"
start() {           # NUMBER, in another process group, which Ctrl-C does not reach
    set -m
    "${tied[@]}" env "$mark.$1" CUDA_VISIBLE_DEVICES="$(slice "$1")" "${command[@]}" \
        --shard "$1/$instances" </dev/null >>"$logs/instance-$1.log" 2>&1 &
    pids[$1]=$!
    set +m
}
stop() {            # SIGNAL; a second one ends the waiting
    deadline=$((asked ? 0 : SECONDS + STOP_S)) asked=$1
    kill -TERM "${pids[@]}" 2>/dev/null || true
}
trap 'stop 15' TERM; trap 'stop 1' HUP; trap 'stop 2' INT
say "$instances instances of TP $tp x PP $PP on ${devices[*]:0:GPUS}; logs $logs/instance-*.log"
for ((i = 0; i < instances; i++)); do start $i; done
while [ ${#pids[@]} -gt 0 ]; do
    sleep 0.5 & wait $! || true         # a signal ends wait
    for i in "${!pids[@]}"; do
        if kill -0 "${pids[i]}" 2>/dev/null && ! ((asked && SECONDS >= deadline)); then continue; fi
        # what it left would keep its GPUs; vLLM's processes empty their environment
        kill -KILL -- "-${pids[i]}" 2>/dev/null || true
        kill_marked "$mark.$i"
        status=0
        wait "${pids[i]}" || status=$?
        unset "pids[i]"
        if [ $status = 0 ] || ((asked)); then continue; fi
        say "instance $i ended with status $status: $(tail -n 1 "$logs/instance-$i.log")"
        if ((tries[i] >= MAX_RESTARTS)); then failed+=("$i"); continue; fi
        say "instance $i starts again in $RESTART_S s ($((++tries[i])) of $MAX_RESTARTS)"
        sleep "$RESTART_S"
        ((asked)) || start "$i"
    done
done
if ((asked)); then
    say "finished lines are kept; rerun the same command to resume"
    exit $((128 + asked))
fi
[ ${#failed[@]} = 0 ] ||
    die "instances ${failed[*]} failed; finished lines are kept; rerun the same command to resume"
trap - TERM HUP INT
exec "${command[@]}"        # all lines are finished: merges them, without a teacher
