#!/usr/bin/env bash
# test.sh: set up on first use, then lint, check types and run the quick tests, two at a time: 8 minutes on two cores.
# test.sh --all: the slow tests too, and tests/deviceless if TORCHTITAN_LITE_CUDA_PYTHON names a Python for them.
# test.sh PYTEST-ARGUMENTS: only run pytest, in the project's folder.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,4s/^# //p' "$0" && exit; fi
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
python=$(scripts/setup.sh dev)
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
if (($#)) && [[ $1 != --all ]]; then exec "$python" -m pytest "$@"; fi

"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy

# A file's tests share runs, so one worker has them; files in conftest.py's order.
parallel=(--numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15)
"$python" -m pytest -m "not slow" "${parallel[@]}"
if (($# == 0)); then exit; fi

"$python" -m pytest -m "slow and not timed" "${parallel[@]}"
each=("${parallel[@]}" --dist load) # their files are few
"$python" -m pytest -m "slow and timed" "${each[@]}"
if [[ -n ${TORCHTITAN_LITE_CUDA_PYTHON:-} ]]; then
    PYTHONPATH=$PWD "$TORCHTITAN_LITE_CUDA_PYTHON" -m pytest tests/deviceless "${each[@]}"
else
    echo "tests/deviceless did not run: TORCHTITAN_LITE_CUDA_PYTHON is not set; CONTRIBUTING.md says how to make one."
fi
