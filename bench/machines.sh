#!/usr/bin/env bash
# The whole suite in a clean clone: as it is, with older vector units, beside busy processes, with the oldest packages;
# then every test that kills or races 20 times.
#
#   bash bench/machines.sh                              # hours; then python bench/table.py
#   SETTINGS=avx2 FILES='tests/common/*.py' bash bench/machines.sh      # some parts
#   SETTINGS= bash bench/machines.sh                    # none: only write the report of what is done
#
# A part is one test file under one setting. Its result is WORK_DIR/COMMIT/SETTING/FILE.xml, beside what it printed, and
# a line of bench/results/machines-parts.jsonl. Parts that have one of these are not run again until a change can touch
# them (reached.py), so an interrupted run goes on where it was, on another machine as well.
set -euo pipefail

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
SETTINGS=${SETTINGS-as-is sse41 avx2 busy oldest races}     # which of them to run
FILES=${FILES:-tests/test_*.py tests/*/test_*.py}           # which test files
COMMIT=${COMMIT:-HEAD}                          # what is cloned
WORK_DIR=${WORK_DIR:-/tmp/machines}             # the clone and the results of the parts
JOBS=${JOBS:-2}                                 # parts that run side by side
REPEATS=${REPEATS:-20}                          # of every race
AGAIN=${AGAIN:-0}                               # 1: parts that failed are run again
VENV=${VENV:-}                                  # environment of all settings but `oldest`; default: the clone's own
PYTHON312=${PYTHON312:-python3.12}              # makes that of `oldest`; also PYTHON312=$(uv python find 3.12)
OLDEST_TORCH=${OLDEST_TORCH:-2.11.0}
OLDEST_TRANSFORMERS=${OLDEST_TRANSFORMERS:-5.17.0}
RESULTS=${RESULTS:-$repo/bench/results}         # where the report goes

# its own test sets them anew
export -n SETTINGS FILES COMMIT WORK_DIR JOBS REPEATS PYTHON312 OLDEST_TORCH OLDEST_TRANSFORMERS RESULTS

say() { echo "machines: $*" >&2; }

# What torch, oneDNN and MKL are told about the processor: cpu_variables SETTING
cpu_variables() {
    case $1 in
    sse41) echo ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 ;;
    avx2) echo ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ;;
    as-is | busy | oldest | races) ;;
    *) say "error: SETTINGS: there is no $1"; return 1 ;;
    esac
}

# One test file, once. The result gets its name when the tests have come to their end: part SETTING FILE RUN
part() {
    local result=$parts/$1/${2//\//.}$3.xml status=0 word=passed cpu=() only=()
    if [ -e "$result" ] && { [ "$AGAIN" != 1 ] || ! grep -qE '<(failure|error)' "$result"; }; then return; fi   # run meanwhile
    read -ra cpu <<<"$(cpu_variables "$1")"
    if [ "$1" = races ]; then only=(-m race); fi
    env -u AGAIN -u parts "${cpu[@]}" python -m pytest -q -rs -p no:cacheprovider "$2" "${only[@]}" \
        --junitxml="$result.new" >"${result%.xml}.log" 2>&1 || status=$?
    case $status in
    0) ;;
    1) word=FAILED ;;
    *) say "$1 $2$3: ended with status $status, see ${result%.xml}.log"; return ;;
    esac
    mv "$result.new" "$result"
    say "$1 $2$3: $word"
}

# Make and activate the environment of a setting, in this shell: enter SETTING
enter() {
    local folder=${VENV:-$clone/.venv} python=${PYTHON:-python3} why=$parts/$1/why
    if [ "$1" = oldest ]; then
        folder=$WORK_DIR/oldest python=$PYTHON312
        "$python" --version >/dev/null 2>&1 || { echo "no Python 3.12 (PYTHON312)" >"$why"; return 1; }
        export TORCH_VERSION=$OLDEST_TORCH
    fi
    rm -f "$why"
    PYTHON=$python VENV=$folder bash "$clone/launch/setup.sh" || return 1
    if [ "$folder" != none ]; then
        # shellcheck disable=SC1091
        source "$folder/bin/activate" || return 1
    fi
    if [ "$1" = oldest ]; then pip install --quiet "transformers==$OLDEST_TRANSFORMERS" || return 1; fi
    unset VENV PYTHON TORCH_VERSION             # the launchers under test find their own
    export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false       # as in launch/test.sh
}

run_setting() {     # SETTING FILE...
    local setting=$1 runs=('') busy=() left=() files todo run file
    shift
    if [ "$setting" = races ]; then
        readarray -t runs < <(seq -f '.%g' "$REPEATS")
        readarray -t files < <(grep -lE 'mark\.race' "$@")
        set -- "${files[@]}"
    fi
    if [ "$setting" = busy ]; then
        for _ in 1 2; do (while :; do :; done) & busy+=($!); done
        # shellcheck disable=SC2064     # these processes
        trap "kill ${busy[*]}" EXIT
    fi
    python "$repo/bench/machines.py" "$parts" --machine >"$parts/$setting/machine"
    left=(--left "$setting" --files "$@" --runs "${runs[@]}")
    if [ "$AGAIN" = 1 ]; then left+=(--again); fi
    todo=$(python "$repo/bench/machines.py" "$parts" --results_dir "$RESULTS" "${left[@]}") || return 1
    if [ -z "$todo" ]; then return; fi
    while IFS=$'\t' read -r file run; do printf '%s\0%s\0%s\0' "$setting" "$file" "$run"; done <<<"$todo" |
        xargs -0 -r -n 3 -P "$JOBS" bash -c 'part "$@"' part
}

commit=$(git -C "$repo" rev-parse --short "$COMMIT^{commit}")
parts=$WORK_DIR/$commit clone=$WORK_DIR/$commit/clone
export parts AGAIN
export -f part cpu_variables say
if [ ! -d "$clone" ]; then
    rm -rf "$clone.new"
    git clone --quiet --no-hardlinks "$repo" "$clone.new"
    git -C "$clone.new" checkout --quiet --detach "$commit"
    mv "$clone.new" "$clone"
fi
cd "$clone"
for setting in $SETTINGS; do
    cpu_variables "$setting" >/dev/null
    mkdir -p "$parts/$setting"
    # shellcheck disable=SC2086     # FILES is a list of patterns
    (enter "$setting" && run_setting "$setting" $FILES) || say "$setting: not run to its end"
done
(enter as-is && python "$repo/bench/machines.py" "$parts" --results_dir "$RESULTS")
