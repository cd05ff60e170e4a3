#!/usr/bin/env bash
# Train from a TOML file: install the project on first use, then start the launcher.
# `./run_train.sh --help` lists the environment variables and every key of the config.
set -euo pipefail
root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
python=$("$root/scripts/setup.sh")
export PYTHONSAFEPATH=1 # Python 3.11 imports nothing from the working directory then
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} # the environment may have another checkout's package
exec "$python" -m torchtitan_lite train "$@"
