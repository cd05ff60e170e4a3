#!/usr/bin/env bash
# test.sh [PYTEST ARGUMENTS]: set up on first use, then lint, type-check and test. Paths are relative to the project.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$(scripts/setup.sh dev)
export OMP_NUM_THREADS=1
"$python" -m ruff check
"$python" -m ruff format --check
"$python" -m mypy
exec "$python" -m pytest "$@"
