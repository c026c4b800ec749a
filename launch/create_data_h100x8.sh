#!/usr/bin/env bash
# Teacher labels on one node of 8 GPUs: 8 / (TP x PP) instances of distill/create_data.py side by
# side, one shard each.
#
#   bash launch/create_data_h100x8.sh INPUT [OUTPUT [TP]] [flags of distill/create_data.py]
#
# OUTPUT is ./data/prompt_distillation_lang.jsonl by default; it appears when every line is finished.
# TP is 4 by default; 1 suits a 30B-A3B teacher in bf16 on 80 GB as well. DRY_RUN=1 checks, prints
# the commands and ends. Ctrl-C, SIGTERM or a dying instance leave no process and lose nothing that
# was finished: run the same command again, also with another TP.
set -euo pipefail
LAUNCHER=create_data_h100x8

allocator=${PYTORCH_ALLOC_CONF:-}
# shellcheck source=launch/env.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
# vLLM's all-reduce (TP > 1) cannot share such memory
if [ -z "$allocator" ]; then unset PYTORCH_ALLOC_CONF; fi

MODEL=${MODEL:-Qwen/Qwen3-30B-A3B-Instruct-2507}    # the teacher: folder or hub name
PP=${PP:-1}                             # pipeline stages; TP x PP GPUs an instance
MAX_MODEL_LEN=${MAX_MODEL_LEN:-0}  # tokens of prompt and answer; 0: 32768, or the model's fewer
ENGINE=${ENGINE:-vllm}                  # of distill/create_data.py
GPUS=${GPUS:-$(count_gpus)}             # GPUs to use
MAX_RESTARTS=${MAX_RESTARTS:-2}         # of each instance that fails
RESTART_S=${RESTART_S:-10}              # seconds before that
STOP_S=${STOP_S:-60}                    # seconds that instances get to end; then they are killed
LOG_EVERY_S=${LOG_EVERY_S:-30}          # seconds between looks at how far they are
DRY_RUN=${DRY_RUN:-0}                   # 1: check, print the commands, end
known=(MODEL PP MAX_MODEL_LEN ENGINE GPUS RESTART_S STOP_S LOG_EVERY_S)
OTHERS='' known_settings                # those of the student may be set for both launchers

# -- checks ----------------------------------------------------------------------------------------

given=()
while [ $# -gt 0 ] && [ ${#given[@]} -lt 3 ] && [[ $1 != -* ]]; do given+=("$1"); shift; done
input=${given[0]:-} output=${given[1]:-./data/prompt_distillation_lang.jsonl} tp=${given[2]:-4}
[ -n "$input" ] || die "INPUT is not set: $LAUNCHER.sh INPUT [OUTPUT [TP]], a line each"
case $tp in 1 | 2 | 4 | 8) ;; *) die "TP is '$tp': 1, 2, 4 or 8" ;; esac
[[ $PP =~ ^[1-9][0-9]*$ ]] || die "PP=$PP: a number from 1 on"
[[ $GPUS =~ ^[1-9][0-9]*$ ]] || die "$HOSTNAME has $GPUS GPUs; set GPUS"
[ $((GPUS % (tp * PP))) = 0 ] ||
    die "$GPUS GPUs cannot be shared out to instances of TP $tp x PP $PP (GPUS)"
need_file "$input" INPUT
engine=()
if [ "$ENGINE" = vllm ]; then engine=(vllm); fi
use_environment python torch "${engine[@]}"

instances=$((GPUS / (tp * PP))) devices=()
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

# What belongs to an instance is known by a mark in its environment, or by its process group: vLLM's
# processes empty their environment.
mark=LABEL_INSTANCE=$$-$RANDOM$RANDOM
logs=$output.work stop=$output.work/stop-${mark#*=}
mkdir -p "$logs"
find "$logs" -name 'stop-*' -mmin +60 -delete      # of killed runs; a younger one may be read yet

instance() {        # NUMBER: start it until it ends well, has failed too often or is to stop
    local tries=0 status pid
    until [ -e "$stop" ]; do
        status=0
        set -m
        env "$mark.$1" CUDA_VISIBLE_DEVICES="$(slice "$1")" "${command[@]}" \
            --shard "$1/$instances" </dev/null >>"$logs/instance-$1.log" 2>&1 &
        pid=$!
        set +m
        wait "$pid" || status=$?
        kill -KILL -- "-$pid" 2>/dev/null || true       # what it left would keep its GPUs
        end_all "$mark\.$1"
        if [ $status = 0 ] || [ -e "$stop" ]; then break; fi
        say "instance $1 ended with status $status: $(tail -n 1 "$logs/instance-$1.log")"
        if [ $((tries++)) -ge "$MAX_RESTARTS" ]; then return 1; fi
        say "instance $1 starts again in $RESTART_S s ($tries of $MAX_RESTARTS)"
        sleep "$RESTART_S"
    done
}

# shellcheck disable=SC2317,SC2329     # supervise and guard call these
run_all() {
    local i pids=() failed=() progress quiet
    for ((i = 0; i < instances; i++)); do instance $i & pids+=($!); done
    exec {quiet}<> <(:)     # nothing to read: to wait without a process
    while ! read -rt "$LOG_EVERY_S" <&"$quiet"; do
        for i in "${!pids[@]}"; do
            say "instance $i: $(grep '^lines ' "$logs/instance-$i.log" | tail -n 1)"
        done
    done &
    progress=$!
    for i in "${!pids[@]}"; do wait "${pids[i]}" || failed+=("$i"); done
    kill -KILL $progress
    [ ${#failed[@]} = 0 ] ||
        die "instances ${failed[*]} failed; finished lines are kept, the same command goes on"
}
# shellcheck disable=SC2317,SC2329
end() { touch "$stop"; end_all "$mark\.[0-9]+"; }
# shellcheck disable=SC2046,SC2317,SC2329
ask() {             # twice: STOP_S are over
    if [ -e "$stop" ]; then end; fi
    touch "$stop"
    kill -TERM $(left "$mark\.[0-9]+")
}

say "$instances instances of TP $tp x PP $PP on ${devices[*]:0:GPUS}; logs $logs/instance-*.log"
guard "$mark\.[0-9]+" "$STOP_S" ask
status=0 REPEAT_S=$STOP_S
supervise ask end run_all || status=$?
kill -KILL -- "-$guard"
rm -f "$stop"
if [ -n "$asked" ]; then
    say "finished lines are kept, the same command goes on"
    exit $((128 + $(kill -l "$asked")))
fi
[ $status = 0 ] || exit $status
trap - USR1 TERM HUP INT    # else what follows would ignore them
exec "${command[@]}"        # all lines are finished: merges them, without a teacher
