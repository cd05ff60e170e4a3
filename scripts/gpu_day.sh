#!/usr/bin/env bash
# gpu_day.sh [--out FOLDER] [--budget SECONDS] [--only PART ...]: what to measure first on a GPU, in at most 25 minutes.
# Sets up on first use, then times kernels, runs tests/gpu and the benchmark's 8B rows, and profiles a step. Writes
# FOLDER/results.json (default: gpu_day-DATE) after each part; stopped by Ctrl-C or SIGTERM, it keeps what it has.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,4s/^# //p' "$0" && exit; fi
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
python=$("$root/scripts/setup.sh" dev)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # the environment may have another checkout's package
exec "$python" "$root/scripts/benchmarks/gpu_day.py" run "$@"
