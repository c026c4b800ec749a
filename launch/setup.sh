#!/usr/bin/env bash
# Make a Python environment that works, then leave it active. Sourced by the demos and test.sh; run
# it alone to only set up. Needs Python >= 3.11 with venv, and no root.
#
#   bash launch/setup.sh                    .venv here, versions of launch/requirements.lock
#   TORCH_CPU=1 bash launch/setup.sh        torch without CUDA: 0.4 GB instead of 3
#   VERSIONS=oldest VENV=old bash launch/setup.sh
set -euo pipefail
for word; do case $word in -h | --help)
    sed -n '2,${/^#/!q; s/^# \{0,1\}//p}' "$0"; exit ;; esac; done
setup_error() { echo "setup: error: $*" >&2; exit 1; }

PYTHON=${PYTHON:-python3}       # Python >= 3.11
VENV=${VENV:-}                  # folder, default .venv here; none: the environment we are in
VERSIONS=${VERSIONS:-locked}    # of launch/requirements.lock; newest or oldest of requirements.txt
case $VERSIONS in
locked | newest) TORCH_VERSION=${TORCH_VERSION:-2.13.0} ;;      # 2.11.0 to 2.14.1
oldest) TORCH_VERSION=${TORCH_VERSION:-2.11.0} ;;
*) setup_error "VERSIONS=$VERSIONS: locked, newest or oldest" ;;
esac
TORCH_CPU=${TORCH_CPU:-0}       # 1: a new environment gets torch without CUDA, from the next if
TORCH_INDEX=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}     # pip's own indexes have none

get() { pip install --quiet --disable-pip-version-check "$@"; }
if [ "$VENV" = none ]; then PYTHON=python; fi
[[ $VENV = none || -z $VENV ]] || VENV=$(realpath -ms "$VENV")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
VENV=${VENV:-$PWD/.venv}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    setup_error "$PYTHON is missing or older than 3.11; set PYTHON=python3.11"
if [ "$VENV" != none ]; then
    exec 9<launch/setup.sh && flock 9       # of two set-ups in one clone the second waits
    [ -x "$VENV/bin/pip" ] || "$PYTHON" -m venv "$VENV" ||
        setup_error "$PYTHON makes no venv: install python3-venv"
    source "$VENV/bin/activate"
fi

installed="torch $TORCH_VERSION, $VERSIONS, $(cat {,launch/}requirements.* pyproject.toml | cksum)"
if [ "$VENV" != none ] && [ "$(cat "$VENV/installed" 2>/dev/null)" != "$installed" ]; then
    rm -f "$VENV/installed"
    echo "setup: installing torch $TORCH_VERSION and requirements.txt ($VERSIONS) into $VENV"
    if [ "$TORCH_CPU" = 1 ]; then
        torch=torch==$TORCH_VERSION+cpu
        get "$torch" 2>/dev/null ||
            get --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch" ||
            setup_error "no $torch by pip, nor at TORCH_INDEX=$TORCH_INDEX; try TORCH_CPU=0"
    else
        pip show --quiet torch 2>/dev/null ||
            echo "setup: torch with CUDA: 3 GB to download. TORCH_CPU=1 takes one without: 0.4 GB"
        get torch=="$TORCH_VERSION"
    fi
    mapfile -t packages < <(python -c 'import sys, tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
found = {line for name in ("demo", "test") for line in extras.get(name, ())}
print("torch==" + sys.argv[1], *sorted(x for x in found if "[" not in x), sep="\n")' \
        "$TORCH_VERSION")
    case $VERSIONS in
    locked) get -c launch/requirements.lock -r requirements.txt "${packages[@]}" ;;
    newest) get --upgrade -r requirements.txt "${packages[@]}" ;;
    oldest) get -r <(sed 's/[, ].*//; s/>=/==/' requirements.txt) "${packages[@]}" ;;
    esac
    echo "$installed" >"$VENV/installed"
fi

# torchaudio links CUDA libraries. With a CPU-only torch its import fails, and every transformers
# import with it; its Python part, all that the codec uses, works once the extension is gone.
if ! python -c 'import torchaudio' 2>/dev/null; then
    folder=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/torchaudio
    if [ ! -e "$folder" ]; then
        echo "setup: torchaudio is not installed: training works from a filled --code_cache only"
    elif [ "$VENV" = none ]; then
        setup_error "torchaudio does not fit this torch; rm $folder/lib/*.so repairs it"
    else
        rm -f "$folder"/lib/*.so
        python -c 'import torchaudio' || setup_error "torchaudio does not work with this torch"
        echo "setup: removed torchaudio's CUDA extension, which this torch cannot load"
    fi
fi
exec 9<&-
