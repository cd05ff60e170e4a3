#!/usr/bin/env bash
# test.sh: set up on first use, then lint, type-check and run all tests, two at a time, and tests of
# time-outs only beside each other. test.sh PYTEST-ARGUMENTS: only run pytest, in the project's folder.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,3s/^# //p' "$0" && exit; fi
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=$(scripts/setup.sh dev)
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
if (($#)); then exec "$python" -m pytest "$@"; fi
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
"$python" -m pytest tests/unit --numprocesses 2
timed=tests/distributed/test_faults_ranks.py
"$python" -m pytest tests/distributed --ignore "$timed" --numprocesses 2 --dist loadfile
exec "$python" -m pytest "$timed" tests/gpu --numprocesses 2
