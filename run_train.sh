#!/usr/bin/env bash
# Train from a TOML file: install the project on first use, then start the launcher.
# `./run_train.sh --help` lists the environment variables and every key of the config.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$root/scripts/setup.sh")
LAUNCHED_AS=$0 exec "$python" -m torchtitan_lite.launch "$@" # LAUNCHED_AS: for the command to go on
