#!/usr/bin/env bash
# setup.sh [EXTRA]: install the project, with an extra of pyproject.toml, if it is not yet, and print the Python to use.
# In an active virtual or conda environment it installs there, otherwise in .venv of the project. pip's own
# configuration decides where packages come from. A stamp in the environment lets a later use start at once.
set -euo pipefail
if [[ ${1:-} == -h || ${1:-} == --help ]]; then sed -n '2,4s/^# //p' "$0" && exit; fi
root=$(dirname "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")")
cd "$root" # Python imports nothing of the user's folder
extra=${1:-}
env=${VIRTUAL_ENV:-${CONDA_PREFIX:-$root/.venv}}
python=$env/bin/python

say() { echo "setup: $*" >&2; }
fail() { say "$@" && exit 1; }
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' &>/dev/null; }

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        if is_recent "$candidate"; then echo "$candidate" && return; fi
    done
    fail "no Python 3.10 or newer found; install one, or activate an environment that has one."
}

make_venv() {
    local base
    base=$(find_python)
    "$base" -c 'import ensurepip, venv' &>/dev/null ||
        fail "$base has no venv module; install it (Debian: apt-get install python3-venv) or activate an environment."
    say "making $env with $("$base" -V)"
    "$base" -m venv --clear "$env" >&2 || fail "could not make $env: see the message above."
}

pip_install() { # prints a line for each large download, and pip's last lines if it fails
    local log
    log=$(mktemp)
    if "$python" -m pip install --progress-bar off --disable-pip-version-check "$@" 2>&1 | tee "$log" |
        sed -un 's|^ *Downloading .*/||; s|^ *Downloading ||; s|^\(\S*\) (\([0-9.]* [MG]B\))$|setup:   \1, \2|p
            s|^Installing collected.*|setup:   unpacking|p' >&2; then
        rm "$log" && return
    fi
    tail -n 20 "$log" >&2 && rm "$log"
    fail "could not install $*: see pip's message above. No network, or the package index is unreachable?"
}

exec 9<"$root/pyproject.toml"
flock 9 2>/dev/null || true # a second first use waits for the first, where the system has flock

stamped=$(echo "$root" && cat "$root/pyproject.toml")
stamp=$env/torchtitan_lite${extra:+-$extra}.stamp
if [[ "$(cat "$stamp" 2>/dev/null)" != "$stamped" ]] ||
    ! "$python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torch"))' &>/dev/null; then
    if [[ $env == "$root/.venv" ]] && ! "$python" -m pip --version &>/dev/null; then make_venv; fi
    is_recent "$python" || fail "$python is missing or older than Python 3.10; leave or change this environment."
    torch=$(sed -n 's/^ *"\(torch[<>=!~][^"]*\)",*$/\1/p' "$root/pyproject.toml")
    say "installing in $env: first use, or pyproject.toml changed; $torch may take minutes"
    pip_install "$torch"
    pip_install --editable "$root${extra:+[$extra]}"
    tee "$env/torchtitan_lite.stamp" >"$stamp" <<<"$stamped" # last: an interrupted install is done again
    say "done"
fi
echo "$python"
