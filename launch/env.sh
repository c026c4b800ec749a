#!/usr/bin/env bash
# Settings and checks of all launchers, which source it. Settings of the shell win.
REPO=$(cd -P "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
for word; do case $word in -h | --help)         # prints the comment at the top of the launcher
    sed -n '2,${/^#SBATCH/d; /^#/!q; s/^# \{0,1\}//p}' "$0"; exit ;; esac; done
say() { echo "${LAUNCHER:-launch}: $*" >&2; }
die() { say "error: $*"; exit 1; }
need_file() { [ -e "$1" ] || die "${2:-$1}: no such file: $1"; }
need_number() {     # NAME...: each variable is empty or a whole number >= 1
    for n; do [[ ${!n} =~ ^([1-9][0-9]*)?$ ]] || die "$n=${!n}: a number from 1 on"; done
}
# shown COMMAND...: for logs, without names and passwords in addresses
shown() { printf '%q ' "$@" | sed -E 's,://[^/?# ]*@,://,g'; }

# The GPUs torch will see: those the driver lists, or fewer when CUDA_VISIBLE_DEVICES says so.
count_gpus() {
    { nvidia-smi -L 2>/dev/null || true; } | awk -v ids="${CUDA_VISIBLE_DEVICES-all}" '/^GPU / {n++}
        END { if (ids != "all" && split(ids, id, ",") < n) n = split(ids, id, ","); print n + 0 }'
}
# The CPUs we may use: Slurm's share, else what affinity allows (nproc obeys OMP_NUM_THREADS).
count_cpus() {
    echo "${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-$(env -u OMP_NUM_THREADS nproc)}}"
}

# -- flags and settings ----------------------------------------------------------------------------
# has_flag --output_dir "$@"
has_flag() { grep -qE "^$1(=|\$)" <<<"$(printf '%s\n' "${@:2}")"; }
# flag_value --output_dir ./output "$@": the flag's last value in a command line, else in its
# --config FILE, else the default.
flag_value() {
    local value='' file='' before='' word
    for word in "${@:3}"; do
        case $before in "$1") value=$word ;; --config) file=$word ;; esac
        case $word in "$1="*) value=${word#*=} ;; --config=*) file=${word#*=} ;; esac
        before=$word
    done
    [ -n "$value" ] || value=$(sed -n "s/[[:space:]]*#.*//; s/^${1#--}:[[:space:]]*//p" "$file" \
        2>/dev/null | sed "s/^[\"']\(.*\)[\"']\$/\1/") || true
    echo "${value:-$2}"
}
arguments=("$@") known=() flags=()  # the launcher's; names of its settings; what its trainer gets
declare -A defaults                 # of a launcher that runs another one

# setting NAME DEFAULT [FLAG [FOLDER_FLAG]]: a variable that people may set. Its value goes to the
# trainer after FLAG (FOLDER_FLAG for a folder) unless it is empty; the launcher passes that of FLAG
# "-". Arguments and --config override the default.
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
    if [ -d "${!1}" ]; then flags+=("${4:-$3}" "${!1}"); else flags+=("$3" "${!1}"); fi
}

# Refuse a variable that would do nothing: one of OTHERS, or a misspelt one of `known`.
OTHERS="BATCH CODEC DATA DATA_PATH GLOBAL_BATCH HDP_LAYOUT LEARNING_RATE MAX_LENGTH PORT_BASE
    MICRO_BATCH_SIZE MODEL_PATH NUM_EPOCHS NUM_GPUS NUM_WORKERS SEQ_LEN SEQ_LENGTH STORY WARMUP
    $(sed -n 's/^setting \([A-Z_]*\) .*/\1/p' "$REPO"/launch/train_*.sh)"  # of notes, of launchers
known_settings() {
    local wrong
    wrong=$(compgen -e | python3 -ISc 'import difflib, sys
known, others = sys.argv[1].split(), sys.argv[2].split()
for name in sorted({*sys.stdin.read().split()} - {*known, "RANK", "TOKEN"}):    # of other programs
    if name in others or difflib.get_close_matches(name, known, 1, 0.85): print(name)' \
        "${known[*]} VENV CONDA_ENV NPROC_PER_NODE MASTER_PORT MAX_RESTARTS MAX_REQUEUES \
        LOG_DIR DRY_RUN SRUN_ARGS MIN_GPUS" "$OTHERS" 2>/dev/null) || wrong=''
    [ -z "$wrong" ] || die "${wrong%%$'\n'*} is not a setting of this launcher; it has ${known[*]}"
}

# translate ARGUMENT...: key=value of other scripts -> flags, in `arguments`, by array `overrides`
translate() {
    local argument key flag value
    arguments=()
    for argument; do
        key=${argument%%=*} key=${key##*+} value=${argument#*=} flag=''
        if [[ $argument == *=* && $key == [a-z]* ]]; then flag=${overrides[$key]:-}; fi
        [[ $flag || $argument != *=* || $key != [a-z]*.* ]] ||
            die "$argument: not a known override; give the flag ($TRAINER --help all)"
        case $flag=$value in
        =*) arguments+=("$argument"); continue ;;
        --bf16=bf*) value=true ;;
        --bf16=16* | --bf16=fp16)
            value=true; say "$argument: float16 would need its losses scaled; using bfloat16" ;;
        --bf16=*32*) value=false ;;
        --attn_backend=flash_attn)
            value=flex; say "$argument: flash attention has no block masks; using flex" ;;
        esac
        arguments+=("$flag" "$value")
    done
}

# SWITCHES, REPORT_TO and LORA as flags, in `switches`. LORA is empty where --config says.
read_switches() {
    [[ $LORA =~ ^[01]?$ ]] || die "LORA=$LORA: 1 or 0"
    read -ra switches <<<"$SWITCHES ${REPORT_TO:+--report_to $REPORT_TO}"
    if [ "$LORA" = 1 ]; then switches+=(--use_lora); fi
}

# -- the Python environment ------------------------------------------------------------------------
# use_environment PROGRAM PACKAGE...: activate VENV, or CONDA_ENV; with neither the environment of
# this shell if it has all that is named, else the .venv of launch/setup.sh. VENV=none: as it is.
use_environment() {
    local folder=${VENV:-}
    if [ -z "$folder" ] && [ -n "${CONDA_ENV:-}" ]; then
        set +u          # conda's scripts read variables that may be unset
        { eval "$(conda shell.bash hook)" && conda activate "$CONDA_ENV"; } 2>/dev/null ||
            die "CONDA_ENV=$CONDA_ENV: no such conda environment"
        set -u
    elif [ -z "$folder" ] && [ -x "$REPO/.venv/bin/$1" ] && ! { command -v "$1" && python -c '
import importlib.util as u, sys
sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "${@:2}"; } >/dev/null 2>&1; then
        folder=$REPO/.venv
        say "environment: $folder"
    fi
    if [ -n "$folder" ] && [ "$folder" != none ]; then
        need_file "$folder/bin/activate" VENV
        source "$folder/bin/activate"
    fi
    command -v "$1" >/dev/null ||
        die "no $1 on PATH: set VENV or CONDA_ENV, or run bash launch/setup.sh"
}

# -- settings for torch ----------------------------------------------------------------------------
# Not set here: TORCH_NCCL_ASYNC_ERROR_HANDLING (by default a rank whose collective failed ends; the
# 1 of older advice can block the dump below) and CUDA_DEVICE_MAX_CONNECTIONS (1 is for tensor
# parallelism; DDP and FSDP lose overlap).
[ -n "${PYTORCH_CUDA_ALLOC_CONF:-}" ] ||            # older name of the next; batches vary in length
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}       # a rank's last collectives,
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}      # written when one hangs
one_machine=(--rdzv-backend=c10d --local-addr=127.0.0.1
    --rdzv-endpoint="127.0.0.1:${MASTER_PORT:-0}")
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}        # nodes that end warn for a page
export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22} NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7}
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} PYTHONUNBUFFERED=1    # a killed process's last words are kept
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}  # threads do not survive a fork

# -- running children ------------------------------------------------------------------------------
REPEAT_S=${REPEAT_S:-5}  # seconds until a request to stop is repeated: a starting trainer misses it

# In front of a command: the kernel sends it SIGTERM when this shell is killed (PR_SET_PDEATHSIG).
tied=(python3 -ISc 'import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])')

# children PID
children() { grep -ls "^PPid:[[:space:]]*$1\$" /proc/[0-9]*/status | cut -d/ -f3 || true; }
# kill_marked NAME=VALUE: kill all with this in their environment, thrice, as one may be starting
kill_marked() {
    local pids
    for _ in 1 2 3; do      # grep fails for processes that ended meanwhile
        mapfile -t pids < <(grep -lszxF "$1" /proc/[0-9]*/environ | cut -d/ -f3)
        kill -KILL "${pids[@]}" 2>/dev/null || break
    done
}

# supervise ASK END COMMAND...: run the command, wait for it, return its status. USR1, TERM, HUP and
# a first INT become ASK PID, repeated until it ends; a second INT becomes END PID. $asked is the
# first signal.
supervise() {
    local ask=$1 end=$2 pid='' early='' status signalled
    asked=''
    stop() {                # without `return`: in a trap that interrupts wait, bash would leave
        signalled=1
        if [ -z "$pid" ]; then early=$1; elif [ -z "$asked" ]; then
            asked=$1
            say "$1: asking what runs to save and stop"
            (trap '' USR1 TERM HUP INT      # bounded, as we may die; it holds no output open
             for _ in {1..200}; do
                 kill -0 "$pid" || exit
                 "$ask" "$pid" || true
                 sleep "$REPEAT_S"
             done) >/dev/null 2>&1 &
        fi
    }
    trap 'stop USR1' USR1; trap 'stop TERM' TERM; trap 'stop HUP' HUP
    # a failure in a trap would end this shell and leave the trainers
    trap 'if [ -n "$asked" ]; then "$end" "$pid" || true; fi; stop INT' INT
    set -m                  # in another process group: Ctrl-C comes to this shell alone
    (trap '' USR1; exec "${@:3}") &     # ignored until the child listens, or an early one kills it
    pid=$!
    set +m
    if [ -n "$early" ]; then stop "$early"; fi
    # a signal ends wait, too
    while signalled='' status=0; wait "$pid" || status=$?; [ -n "$signalled" ]; do :; done
    trap '' USR1 TERM HUP INT
    return $status
}
