#!/usr/bin/env bash
# Settings and checks shared by the launchers; sourced, not run. Settings of the shell win:
# NCCL_DEBUG=INFO sbatch ...

REPO=$(cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

for word; do        # --help prints the comment at the top of the launcher
    case $word in -h | --help)
        sed -n '2,${/^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p}' "$0"
        exit ;;
    esac
done

say() { echo "${LAUNCHER:-launch}: $*" >&2; }
die() { say "error: $*"; exit 1; }
need_file() { [ -e "$1" ] || die "${2:-$1}: no such file: $1"; }
need_number() {     # NAME...: each variable is empty or a whole number >= 1
    local name
    for name; do
        [[ -z ${!name} || ${!name} =~ ^[1-9][0-9]*$ ]] || die "$name=${!name}: a number from 1 on"
    done
}

# Print a command for logs, without names and passwords in addresses.
shown() { printf '%q ' "$@" | sed -E 's,://[^/?# ]*@,://,g'; }

# The GPUs torch will see: those the driver lists, or fewer when CUDA_VISIBLE_DEVICES says so.
count_gpus() {
    local listed visible=()
    listed=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
    IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES-}"
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ] && [ ${#visible[@]} -lt "$listed" ]; then
        listed=${#visible[@]}
    fi
    echo "$listed"
}

# The CPUs we may use: Slurm's share, else what affinity allows (nproc obeys OMP_NUM_THREADS).
count_cpus() {
    echo "${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-$(env -u OMP_NUM_THREADS nproc)}}"
}

# -- flags and settings ----------------------------------------------------------------------------

has_flag() {        # has_flag --output_dir "$@"
    local word
    for word in "${@:2}"; do case $word in "$1" | "$1="*) return 0 ;; esac; done
    return 1
}

# flag_value --output_dir ./output "$@": the flag's last value in a command line, else in its
# --config FILE, else the default.
flag_value() {
    local flag=$1 value=$2 file='' given=''
    for ((i = 3; i <= $#; i++)); do
        case ${!i} in
        "$flag") given=1 value=${*:i+1:1} ;;
        "$flag="*) given=1 value=${!i#*=} ;;
        --config) file=${*:i+1:1} ;;
        --config=*) file=${!i#*=} ;;
        esac
    done
    if [ -z "$given" ] && grep -qs "^${flag#--}:" "$file"; then
        value=$(sed -n "s/^${flag#--}:[[:space:]]*//p" "$file" |
            sed "s/[[:space:]]*#.*//; s/^[\"']\(.*\)[\"']\$/\1/")
    fi
    echo "$value"
}

# The launcher's arguments; the names of its settings; what goes to its trainer; defaults of a
# launcher that runs another one.
arguments=("$@") known=() flags=()
declare -A defaults

# setting NAME DEFAULT [FLAG [FOLDER_FLAG]]: a variable that people may set. Its value goes to the
# trainer after FLAG (FOLDER_FLAG for a folder) unless it is empty; FLAG "-": the launcher passes it.
# Arguments and --config override the default.
setting() {
    local set=${!1+yes} flag
    known+=("$1")
    if [ -z "$set" ]; then
        printf -v "$1" %s "${defaults[$1]-$2}"
        if [ $# -gt 2 ] && has_flag --config "${arguments[@]}"; then printf -v "$1" %s ''; fi
    fi
    for flag in "${@:3}"; do
        has_flag "$flag" "${arguments[@]}" || continue
        [ -z "$set" ] || die "$1 is set and $flag is given: leave one of them out"
        return 0
    done
    if [ $# = 2 ] || [ "$3" = - ] || [ -z "${!1}" ]; then return 0; fi
    if [ $# = 4 ] && [ -d "${!1}" ]; then flag=$4; else flag=$3; fi
    flags+=("$flag" "${!1}")
}

OTHERS="BATCH BATCH_SIZE BLOCK_SIZE CODEC DATA DATA_PATH EPOCHS EVAL_STEPS GLOBAL_BATCH
    GLOBAL_BATCH_SIZE GPUS GRAD_ACCUM GROUP_SIZE HDP_LAYOUT INIT_FROM LEARNING_RATE LOADERS
    LOGGING_STEPS LORA LORA_ALPHA LORA_RANK LORA_TARGETS LR MAX_LENGTH MAX_STEPS MICRO_BATCH_SIZE
    MODEL MODEL_PATH NUM_EPOCHS NUM_GPUS NUM_WORKERS OUTPUT_DIR PREPROCESS PRESET REPORT_TO
    SAMPLE_FLAGS SAVE_STEPS SEQ_LEN SEQ_LENGTH SIZE STORY SWITCHES TEST_DATA TOKENIZER TRAIN_DATA
    TRAIN_FILE VALIDATION WARMUP WARMUP_STEPS WORKERS"      # settings of other launchers and notes

# Refuse a variable that would do nothing: one of OTHERS, or a misspelt one of `known`.
known_settings() {
    local name near
    for name in $OTHERS; do
        if [ -z "${!name+set}" ] || [[ " ${known[*]} " = *" $name "* ]]; then continue; fi
        die "$name=${!name}: not a setting of this launcher; it has ${known[*]}"
    done
    near=$(compgen -e | python3 -ISc 'import difflib, sys
for name in set(sys.stdin.read().split()) - {*sys.argv, "RANK", "TOKEN"}:  # of other programs
    for near in difflib.get_close_matches(name, sys.argv[1:], 1, 0.85): print(name, near)' \
        "${known[@]}" VENV CONDA_ENV NPROC_PER_NODE MASTER_PORT PORT_BASE MAX_RESTARTS \
        MAX_REQUEUES LOG_DIR DRY_RUN SRUN_ARGS MIN_GPUS 2>/dev/null) || near=''
    [ -z "$near" ] || die "${near%% *} is set, which is not a setting; the nearest is ${near##* }"
}

# translate ARGUMENT...: key=value overrides of other people's scripts -> flags, by the array
# `overrides`, KEY to FLAG, of the launcher. The result is `arguments`.
translate() {
    local argument key flag value
    arguments=()
    for argument; do
        key=${argument%%=*} key=${key##*+} value=${argument#*=} flag=''
        if [[ $argument == *=* && $key == [a-z]* ]]; then
            flag=${overrides[$key]:-}
            [[ -n $flag || $key != *.* ]] || die "$argument: not one of the overrides that are" \
                "known here; give the flag ($TRAINER --help all)"
        fi
        case $flag=$value in
        =*) arguments+=("$argument"); continue ;;
        --bf16=bf*) value=true ;;
        --bf16=16* | --bf16=fp16)
            say "$argument: float16 would need its losses scaled; using bfloat16"
            value=true ;;
        --bf16=fp32 | --bf16=float32 | --bf16=32*) value=false ;;
        --attn_backend=flash_attn)
            say "$argument: flash attention has no block masks; using flex"
            value=flex ;;
        esac
        arguments+=("$flag" "$value")
    done
}

# read_switches FLAG...: SWITCHES, REPORT_TO and LORA as flags, in `switches`; the FLAGs where all
# weights are trained and the trainer does not choose.
read_switches() {
    local reports
    # shellcheck disable=SC2153     # setting() made it
    read -ra switches <<<"$SWITCHES"
    read -ra reports <<<"${REPORT_TO:-}"
    if [ -n "${REPORT_TO:-}" ]; then switches+=(--report_to "${reports[@]}"); fi
    case $LORA in
    1) switches+=(--use_lora) ;;
    0) has_flag --auto "${switches[@]}" || switches+=("$@") ;;
    '') ;;                      # --config says
    *) die "LORA=$LORA: 1 or 0" ;;
    esac
}

# -- the Python environment ------------------------------------------------------------------------

# on_path PROGRAM PACKAGE...: whether PATH has this program, and its python these packages.
on_path() {
    command -v "$1" >/dev/null && python -c 'import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "${@:2}" 2>/dev/null
}

has_conda_env() { command -v conda >/dev/null && conda env list | grep "^$1 " >/dev/null; }

# use_environment PROGRAM PACKAGE...: activate VENV, or CONDA_ENV; with neither the environment of
# this shell if it has all that is named, else the .venv of launch/setup.sh. VENV=none: as it is.
use_environment() {
    local folder=${VENV:-}
    if [ -z "$folder" ] && [ -n "${CONDA_ENV:-}" ]; then
        has_conda_env "$CONDA_ENV" || die "CONDA_ENV=$CONDA_ENV: no such conda environment"
        set +u          # conda's scripts read variables that may be unset
        eval "$(conda shell.bash hook)"
        conda activate "$CONDA_ENV"
        set -u
    elif [ -z "$folder" ] && ! on_path "$@" && [ -x "$REPO/.venv/bin/$1" ]; then
        folder=$REPO/.venv
        say "environment: $folder"
    fi
    if [ -n "$folder" ] && [ "$folder" != none ]; then
        need_file "$folder/bin/activate" VENV
        # shellcheck disable=SC1091
        source "$folder/bin/activate"
    fi
    command -v "$1" >/dev/null ||
        die "no $1 on PATH: set VENV or CONDA_ENV, or run bash launch/setup.sh"
}

# -- settings for torch ----------------------------------------------------------------------------

# Growing segments fit batches of changing length without fragments. CUDA 12's older name of the
# variable wins if it is set. Not set here: TORCH_NCCL_ASYNC_ERROR_HANDLING (its default ends a rank
# whose collective failed; the 1 of older advice can block the dump below) and
# CUDA_DEVICE_MAX_CONNECTIONS (1 is for tensor parallelism; DDP and FSDP lose overlap).
if [ -z "${PYTORCH_CUDA_ALLOC_CONF:-}" ]; then
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}       # a rank's last collectives,
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}      # written when one hangs
if [ "${MAX_RESTARTS:-0}" != 0 ]; then      # the agent's store would have addresses of dead ranks
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
fi
# shellcheck disable=SC2034     # torchrun on one machine: a free port, no host name needed
one_machine=(--rdzv-backend=c10d --rdzv-endpoint="127.0.0.1:${MASTER_PORT:-0}"
    --local-addr=127.0.0.1)
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}        # nodes that end warn for a page
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}                           # INFO shows rings and networks
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}       # InfiniBand: 17 s, a switch may reroute,
export NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7}    # as often as it can
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}  # threads do not survive a fork
export PYTHONUNBUFFERED=1                           # a killed process's last words are in the log

# -- running children ------------------------------------------------------------------------------

REPEAT_S=${REPEAT_S:-5}  # seconds until a request to stop is repeated: a starting trainer misses it

# In front of a command: the kernel sends it SIGTERM when this shell is killed.
# shellcheck disable=SC2034
tied=(python3 -ISc 'import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)      # PR_SET_PDEATHSIG, SIGTERM
os.execvp(sys.argv[1], sys.argv[1:])')

# kill_marked NAME=VALUE: kill every process with this in its environment, in whatever session; again,
# for one that was just being started.
kill_marked() {
    local pids
    for _ in 1 2 3; do      # grep fails for processes that ended meanwhile
        pids=$(grep -lszxF "$1" /proc/[0-9]*/environ | cut -d/ -f3) || true
        # shellcheck disable=SC2086
        kill -KILL $pids 2>/dev/null || break
    done
}

# supervise ASK END COMMAND...: run the command, wait for it, return its status. USR1, TERM, HUP and
# a first INT become ASK PID, repeated until it ends; a second INT becomes END PID. $asked is the
# first signal.
supervise() {
    local ask=$1 end=$2 pid='' early='' reminder='' status signalled
    shift 2
    asked=''
    # shellcheck disable=SC2317,SC2329     # the traps call it
    stop() {                # without `return`: in a trap that interrupts wait, bash would leave
        signalled=1
        if [ -z "$pid" ]; then
            early=$1
        elif [ -z "$asked" ]; then
            asked=$1
            say "$1: asking what runs to save and stop"
            set -m          # a process group, so that its sleep ends with it; bounded, as we may die
            (trap '' USR1 TERM HUP INT
             for _ in {1..200}; do "$ask" "$pid" || true; sleep "$REPEAT_S"; done) 2>/dev/null &
            reminder=$!
            disown "$reminder"
            set +m
        fi
    }
    trap 'stop USR1' USR1
    trap 'stop TERM' TERM
    trap 'stop HUP' HUP
    trap 'if [ -n "$asked" ]; then "$end" "$pid"; fi; stop INT' INT
    set -m                  # in a process group of its own: Ctrl-C comes to this shell alone
    (trap '' USR1; exec "$@") &     # ignored until the child listens: an early one is not its death
    pid=$!
    set +m
    if [ -n "$early" ]; then stop "$early"; fi
    # a signal ends wait, too
    while signalled='' status=0; wait "$pid" || status=$?; [ -n "$signalled" ]; do :; done
    trap '' USR1 TERM HUP INT
    if [ -n "$reminder" ]; then kill -KILL -- "-$reminder"; fi
    return $status
}
