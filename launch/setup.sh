#!/usr/bin/env bash
# Make a Python environment that works, then leave it active. Sourced by demo.sh and test.sh; run it alone to only set up.
set -euo pipefail

PYTHON=${PYTHON:-python3}                 # Python >= 3.11
VENV=${VENV:-.venv}                       # "none": use the current environment as it is, install nothing
TORCH_VERSION=${TORCH_VERSION:-2.13.0}    # 2.11 to 2.14.1 fit torchaudio 2.11.0

cd "$(dirname "${BASH_SOURCE[0]}")/.."

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "setup: $PYTHON is missing or older than 3.11; set PYTHON=python3.11" >&2; exit 1; }

if [ "$VENV" != none ]; then
    if [ ! -x "$VENV/bin/pip" ]; then
        # Debian and Ubuntu ship Python without venv; root can mend that, others are told how
        if ! "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
            if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
                echo "setup: $PYTHON cannot make a venv; sudo apt-get install python3-venv" >&2
                exit 1
            fi
            echo "setup: installing python3-venv"
            apt-get update -qq && apt-get install -y -qq --no-install-recommends python3-venv >/dev/null
        fi
        "$PYTHON" -m venv "$VENV"
    fi
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
    stamp=$VENV/installed-torch-$TORCH_VERSION-$(cksum <requirements.txt | tr ' ' -)
    if [ ! -e "$stamp" ]; then
        echo "setup: installing torch $TORCH_VERSION and requirements.txt into $VENV (minutes the first time)"
        pip install --quiet --disable-pip-version-check "torch==$TORCH_VERSION"
        pip install --quiet --disable-pip-version-check -r requirements.txt
        touch "$stamp"
    fi
fi

# The newest torchaudio links CUDA libraries. Beside a CPU-only torch its import fails, and every transformers import
# with it; its Python part, all that the codec uses, works once the extension is gone.
if ! python -c 'import torchaudio' 2>/dev/null; then
    folder=$(python -c 'import importlib.util as u; s = u.find_spec("torchaudio"); print(s.submodule_search_locations[0] if s else "")')
    if [ -z "$folder" ]; then
        echo "setup: torchaudio is not installed: training works from a filled --code_cache only"
    elif [ "$VENV" = none ]; then
        echo "setup: torchaudio does not fit this torch; mend it with: rm $folder/lib/*.so" >&2
        exit 1
    else
        rm -f "$folder"/lib/*.so
        python -c 'import torchaudio' || { echo "setup: torchaudio cannot be imported beside torch $TORCH_VERSION" >&2; exit 1; }
        echo "setup: removed torchaudio's CUDA extension, which a CPU-only torch cannot load; the codec does not use it"
    fi
fi
