#!/usr/bin/env bash
# Settings and checks shared by the launchers; sourced, not run. What is set already is kept: NCCL_DEBUG=INFO sbatch ...

REPO=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)    # this repository; absolute, for other folders and nodes

# -- what this node has ------------------------------------------------------------------------------------------------

# The GPUs torch will see: those the driver lists, or fewer when CUDA_VISIBLE_DEVICES says so.
count_gpus() {
    local listed=0 visible=()
    if command -v nvidia-smi >/dev/null; then listed=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true); fi
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
        if [ "${#visible[@]}" -lt "$listed" ]; then listed=${#visible[@]}; fi
    fi
    echo "$listed"
}

# The CPUs we may use: Slurm's share, else what affinity allows (nproc obeys OMP_NUM_THREADS, so without it).
count_cpus() { echo "${SLURM_CPUS_PER_TASK:-${SLURM_CPUS_ON_NODE:-$(env -u OMP_NUM_THREADS nproc)}}"; }

# Host memory in GiB: what Slurm gave, else what the machine has.
count_memory() {
    if [ "${SLURM_MEM_PER_NODE:-0}" -gt 0 ]; then echo $((SLURM_MEM_PER_NODE / 1024)); return; fi
    awk '/^MemTotal:/ { print int($2 / 1048576) }' /proc/meminfo
}

# True where an InfiniBand port is up; RoCE and Ethernet ports show up in the same folder.
has_infiniband() {
    local port
    for port in "${INFINIBAND_SYSFS:-/sys/class/infiniband}"/*/ports/*; do
        if grep -qs InfiniBand "$port/link_layer" && grep -qs ACTIVE "$port/state"; then return 0; fi
    done
    return 1
}

# -- checks, each ending in one clear line -----------------------------------------------------------------------------

say() { echo "${LAUNCHER:-launch}: $*" >&2; }
die() { say "error: $*"; exit 1; }

# A command as it may be printed and kept: without names and passwords in addresses.
shown() { printf '%q ' "$@" | sed -E 's,://[^/?# ]*@,://,g'; }

need_file() { [ -e "$1" ] || die "${2:-$1}: no such file: $1"; }

need_free_port() {
    if (exec 3<>"/dev/tcp/localhost/$1") 2>/dev/null; then
        die "port $1 on $(hostname) is in use; set MASTER_PORT to another one"
    fi
}

# The value of a flag in a command line, the last one as in the trainer, else in its --config FILE, else the default:
# flag_value --output_dir ./output "$@"
flag_value() {
    local flag=$1 value=$2 file='' given=''
    shift 2
    while [ $# -gt 0 ]; do
        case $1 in
        "$flag") given=1 value=${2:-} ;;
        "$flag="*) given=1 value=${1#*=} ;;
        --config) file=${2:-} ;;
        --config=*) file=${1#*=} ;;
        esac
        shift
    done
    if [ -z "$given" ] && [ -f "$file" ] && grep -q "^${flag#--}:" "$file"; then
        value=$(sed -n "s/^${flag#--}:[[:space:]]*//p" "$file" | sed "s/[[:space:]]*#.*//; s/^[\"']\(.*\)[\"']\$/\1/")
    fi
    echo "$value"
}

# True if the command line has this flag: has_flag --output_dir "$@"
has_flag() {
    local flag=$1 word
    shift
    for word in "$@"; do case $word in "$flag" | "$flag="*) return 0 ;; esac; done
    return 1
}

# -- settings of a launcher --------------------------------------------------------------------------------------------

arguments=("$@") known=() flags=()      # of the launcher; what it knows as a setting; what goes to its trainer

# setting NAME DEFAULT [FLAG [FOLDER_FLAG]]: a variable that people may set. Its value goes to the trainer behind FLAG,
# or FOLDER_FLAG where it is a folder, unless it is empty; with FLAG "-" the launcher sees to that. The arguments count
# more than the default, and so does --config, which says all at once.
setting() {
    local set=${!1+yes} flag
    known+=("$1")
    if [ -z "$set" ]; then
        printf -v "$1" %s "$2"
        if [ $# -gt 2 ] && has_flag --config "${arguments[@]}"; then printf -v "$1" %s ''; fi
    fi
    for flag in "${@:3}"; do
        if has_flag "$flag" "${arguments[@]}"; then
            [ -z "$set" ] || die "$1 is set and $flag is given: leave one of them out"
            return 0
        fi
    done
    if [ $# = 2 ] || [ "$3" = - ] || [ -z "${!1}" ]; then return 0; fi
    if [ $# = 4 ] && [ -d "${!1}" ]; then flag=$4; else flag=$3; fi
    flags+=("$flag" "${!1}")
}

# Settings of the other launchers, and names in people's notes: one that is set and not known here would do nothing.
known_settings() {
    local name
    for name in BATCH BATCH_SIZE BLOCK_SIZE CODEC DATA DATA_PATH EPOCHS EVAL_STEPS GLOBAL_BATCH GLOBAL_BATCH_SIZE GPUS \
        GRAD_ACCUM GROUP_SIZE HDP_LAYOUT INIT_FROM LEARNING_RATE LOADERS LOGGING_STEPS LORA LORA_ALPHA LORA_RANK LORA_TARGETS LR \
        MAX_STEPS MICRO_BATCH_SIZE MODEL MODEL_PATH NUM_EPOCHS NUM_GPUS NUM_WORKERS OUTPUT_DIR PREPROCESS PRESET \
        REPORT_TO SAMPLE_FLAGS SAVE_STEPS SIZE SWITCHES TEST_DATA TOKENIZER TRAIN_DATA TRAIN_FILE VALIDATION WARMUP \
        WARMUP_STEPS WORKERS; do
        case " ${known[*]} " in *" $name "*) continue ;; esac
        [ -z "${!name+set}" ] || die "$name=${!name}: not a setting of this launcher; it has ${known[*]}"
    done
}

# -- the Python environment --------------------------------------------------------------------------------------------

# True if the PATH has this program, and its python these packages; none of them is imported: on_path PROGRAM PACKAGE...
on_path() {
    command -v "$1" >/dev/null &&
        python -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' "${@:2}" 2>/dev/null
}

has_conda_env() { command -v conda >/dev/null && conda env list | grep "^$1 " >/dev/null; }

# False if python's torch can use no GPU; prints torch's folder. Read from its files: an import would take seconds.
torch_for_gpus() {
    python -c 'import importlib.util as u, pathlib, runpy, sys
spec = u.find_spec("torch")
if not spec: sys.exit()
folder = pathlib.Path(spec.origin).parent
print(folder)
built = runpy.run_path(folder / "version.py")
sys.exit(not any(built.get(name) for name in ("cuda", "hip", "xpu")))'
}

# Activate what the run needs: use_environment PROGRAM PACKAGE... In every launcher VENV=FOLDER is a virtual environment,
# VENV=none the environment this shell is in, as it is, and CONDA_ENV a conda environment. With none of them it is the
# one this shell is in if it has all that is named, else the .venv that launch/setup.sh has made.
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
    case $folder in
    '' | none) ;;
    *)
        need_file "$folder/bin/activate" VENV
        # shellcheck disable=SC1091
        source "$folder/bin/activate"
        ;;
    esac
    command -v "$1" >/dev/null || die "no $1 on PATH: set VENV or CONDA_ENV, or run bash launch/setup.sh"
}

# For demos: what use_environment will look for is made, unless it is there: set_up PROGRAM PACKAGE...
set_up() {
    case ${VENV:-} in
    none) return ;;
    '') if [ -n "${CONDA_ENV:-}" ] || on_path "$@"; then return; fi ;;
    *) if PATH=$VENV/bin on_path "$@"; then return; fi ;;
    esac
    bash "$REPO/launch/setup.sh"        # quick if an earlier one came to its end
}

# -- settings for torch ------------------------------------------------------------------------------------------------

# Segments that grow fit batches of changing length without fragments. No max_split_size_mb beside it: it would only bar
# requests below that size from larger free blocks, so memory would grow. CUDA 12's older name would win if it were set.
if [ -z "${PYTORCH_CUDA_ALLOC_CONF:-}" ]; then
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
fi

# TORCH_NCCL_ASYNC_ERROR_HANDLING is not set: its default, 3, ends a rank whose collective failed; the 1 of older advice
# aborts communicators first, which can block the dump below.
# CUDA_DEVICE_MAX_CONNECTIONS is not set: 1 orders kernels for tensor parallelism and takes overlap from DDP and FSDP.

export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-2000}                   # flight recorder: a rank's last collectives
export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}          # written out when one hangs

# Where torchrun restarts workers, each start gets a store of its own: out of the agent's, restarted ones read addresses
# of dead ones. Elsewhere the agent's is better: no second port has to be found, and no name looked up for it.
if [ "${MAX_RESTARTS:-0}" != 0 ]; then
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
fi

# torchrun's rendezvous on one machine, on a free port unless MASTER_PORT says which: as --standalone, but no host name
# has to mean anything.
# shellcheck disable=SC2034     # the launchers use it
one_machine=(--rdzv-backend=c10d --rdzv-endpoint="127.0.0.1:${MASTER_PORT:-0}" --local-addr=127.0.0.1)

# Only errors of torch's C++ side: nodes that leave after the first one print a page of warnings about its store.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

export NCCL_DEBUG=${NCCL_DEBUG:-WARN}                   # INFO shows rings, networks and versions, in the nodes' logs
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}      # its threads do not survive the loaders' fork
export PYTHONUNBUFFERED=1                               # the last words of a killed process are in the log

if has_infiniband; then
    export NCCL_IB_TIMEOUT=${NCCL_IB_TIMEOUT:-22}       # 17 s: a switch that reroutes does not end the run
    export NCCL_IB_RETRY_CNT=${NCCL_IB_RETRY_CNT:-7}    # as often as InfiniBand can
fi

# -- running a child ---------------------------------------------------------------------------------------------------

REPEAT_S=${REPEAT_S:-5}     # seconds until the wish to stop is repeated: trainers that are still starting miss it

# runs PID: is it there? A killed process keeps its number until its parent asks how it ended, if that ever does.
runs() {
    local stat
    { read -r stat <"/proc/$1/stat"; } 2>/dev/null && stat=${stat##*) } && [ "${stat%% *}" != Z ]
}

# supervise ASK END COMMAND...: run the command, wait for it, return its status. USR1, TERM, HUP and a first INT become
# ASK PID, repeated until it ends; a second INT becomes END PID. $asked is the first signal that came.
supervise() {
    local ask=$1 end=$2 pid='' early='' reminder='' status signalled
    shift 2
    asked=''
    # shellcheck disable=SC2317,SC2329     # the traps call it
    stop() {                # without `return`: in a trap that interrupts wait, bash would leave the script
        signalled=1
        if [ -z "$pid" ]; then
            early=$1
        elif [ -z "$asked" ]; then
            asked=$1
            say "$1: asking the trainers to save and stop"
            set -m
            (trap '' USR1 TERM HUP INT; while runs $$; do "$ask" "$pid" || true; sleep "$REPEAT_S"; done) 2>/dev/null &
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
    (trap '' USR1; exec "$@") &     # ignored until the child listens to it: a signal that comes early is not its death
    pid=$!
    set +m
    if [ -n "$early" ]; then stop "$early"; fi
    while signalled='' status=0; wait "$pid" || status=$?; [ -n "$signalled" ]; do :; done   # a signal ends wait, too
    trap '' USR1 TERM HUP INT
    if [ -n "$reminder" ]; then kill -KILL -- "-$reminder"; fi
    return $status
}
