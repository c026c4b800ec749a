#!/usr/bin/env bash
# Set up, then run every test; arguments go to pytest, e.g. launch/test.sh tests/test_labels.py -x
set -euo pipefail

here=$(dirname "${BASH_SOURCE[0]}")
# shellcheck source=launch/setup.sh
source "$here/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
exec python -m pytest -q --durations=10 "$@"
