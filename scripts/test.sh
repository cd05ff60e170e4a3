#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: set up on first use, then lint, type-check and test: with arguments what these say, relative
# to the project; else everything, two at a time, and tests of time-outs only beside each other.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=$(scripts/setup.sh dev)
export OMP_NUM_THREADS=1
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
if (($#)); then exec "$python" -m pytest "$@"; fi
"$python" -m pytest tests/unit --numprocesses 2
timed=tests/distributed/test_faults_ranks.py
"$python" -m pytest tests/distributed --ignore "$timed" --numprocesses 2 --dist loadfile
exec "$python" -m pytest "$timed" tests/gpu --numprocesses 2
