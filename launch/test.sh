#!/usr/bin/env bash
# Set up, then run every test. Arguments go to pytest:
#
#   bash launch/test.sh -m "not slow"
#   bash launch/test.sh tests/speech/test_labels.py -x
#   VERSIONS=oldest VENV=old bash launch/test.sh -m "not slow"
set -euo pipefail

# test files that run side by side; many tests wait more than they compute
TEST_PROCESSES=${TEST_PROCESSES:-4}

here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
source "$here/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE       # hundreds of processes would compile the same modules
# the launchers under test find an environment; this one is active
export -n VENV VERSIONS TORCH_VERSION
exec python -m pytest -q -rs --durations=10 -n "$TEST_PROCESSES" --dist loadfile "$@"
