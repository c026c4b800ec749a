#!/usr/bin/env bash
# Set up, then run every test. Arguments go to pytest:
#
#   bash launch/test.sh -m "not slow"
#   bash launch/test.sh tests/speech/test_labels.py -x
#   VERSIONS=oldest VENV=old bash launch/test.sh -m "not slow"
set -euo pipefail
TEST_PROCESSES=${TEST_PROCESSES:-5}     # files side by side; many tests wait more than they compute
source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/setup.sh"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=false
unset PYTHONDONTWRITEBYTECODE       # hundreds of processes would compile the same modules
export -n VENV VERSIONS TORCH_VERSION   # launchers under test find the environment, which is active
exec python -m pytest -q -rs --durations=10 -n "$TEST_PROCESSES" --dist loadfile "$@"
