#!/usr/bin/env bash
# Rewrite requirements.lock: the newest versions that requirements.txt and pyproject.toml allow,
# of every package that launch/setup.sh installs, for all Pythons. torch is not in it, nor what
# torch's own wheel pins (CUDA, Triton): TORCH_VERSION says which. Then run the tests before you
# commit it: VERSIONS=newest bash launch/test.sh
set -euo pipefail

for word; do case $word in -h | --help) sed -n '2,${/^#/!q; s/^# \{0,1\}//p}' "$0"; exit ;; esac; done
PYTHON=${PYTHON:-python3}  # Python >= 3.11; makes an environment for uv where there is none
TORCH_VERSION=${TORCH_VERSION:-2.13.0}    # that the others have to fit

cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! command -v uv >/dev/null; then
    "$PYTHON" -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check uv
    PATH=$work/venv/bin:$PATH
fi
echo "torch==$TORCH_VERSION" >"$work/torch"
uv pip compile --quiet --universal --python-version 3.11 --extra test --constraint "$work/torch" \
    --no-header --no-annotate --no-emit-package torch --no-emit-package flat-trainers "$@" \
    pyproject.toml >"$work/all"
{
    echo "# Written by launch/lock.sh on $(date +%F), beside torch $TORCH_VERSION; for setup.sh."
    grep -E '^[a-z0-9]' "$work/all" | grep -vE '^(nvidia|cuda|triton)' |
        sed "s/ \(;\|and\) sys_platform == 'linux'//"
} >"$work/lock"
mv "$work/lock" requirements.lock
