#!/usr/bin/env bash
# Train from a TOML file: set up on first use, check the config, run torchrun, and exit with what ended the run.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'END'
usage: [VARIABLE=value ...] ./run_train.sh [--table.key value ...]

  CONFIG_FILE    TOML file (the project's train_configs/debug_model.toml)
  NGPU           processes on this node (the number of CUDA devices; 2 where there are none)
  LOG_RANK       comma-separated local ranks that print everything; the others print warnings and errors (0)
  NNODES         nodes (1); for more, start this script on each of them with the next two:
  NODE_RANK      number of this node, from 0
  RDZV_ENDPOINT  host:port of node 0
  MAX_RESTARTS   times that all ranks are started again after a failure, to go on from the last checkpoint (0)
  OMP_NUM_THREADS  threads of a process (the number of cores over NGPU, at least 1)
  OMP_WAIT_POLICY  ACTIVE: OpenMP threads spin while they wait; PASSIVE: they sleep (PASSIVE without CUDA devices)
  TORCH_ELASTIC_SHUTDOWN_TIMEOUT  seconds that a stopped run may take to save (600)

SIGTERM or SIGINT (Ctrl-C) stops the run before its next forward pass and saves the last finished step; a second one, if
it is SIGINT or comes 3 s later, kills it, and the last checkpoint stays.

exit code: 0 done, 2 config, 3 data, 4 checkpoint, 5 numeric, 6 rank lost or timed out, 7 storage, 1 unexpected,
75 stopped on a signal, and saved where checkpoints are on

END
}

fail() {
    echo "run_train.sh: $*" >&2
    exit 2
}

require_count() { # NAME MINIMUM
    [[ ${!1:-} =~ ^(0|[1-9][0-9]{0,5})$ ]] && ((${!1} >= $2)) || fail "$1=${!1:-} is not a whole number of $2 or more."
}

cuda_devices() { # that PyTorch may use
    local devices
    if [[ -v CUDA_VISIBLE_DEVICES ]]; then
        devices=$(tr , '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[0-9GM]') || true # 0, GPU-..., MIG-...; not -1
    else
        devices=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
    fi
    echo "$devices"
}

python=$("$root/scripts/setup.sh")
if [[ " $* " =~ \ (--help|-h)\  ]]; then
    usage
    exec "$python" -m torchtitan_lite.config --help
fi

devices=$(cuda_devices)
: "${CONFIG_FILE:=$root/train_configs/debug_model.toml}" "${NGPU:=$((devices > 0 ? devices : 2))}" "${NNODES:=1}" "${MAX_RESTARTS:=0}"
require_count NGPU 1
require_count NNODES 1
require_count MAX_RESTARTS 0
if ((NNODES == 1)); then
    nodes='' rendezvous=(--standalone)
else
    require_count NODE_RANK 0
    ((NODE_RANK < NNODES)) || fail "NODE_RANK=$NODE_RANK must be below NNODES=$NNODES; nodes count from 0."
    [[ ${RDZV_ENDPOINT:-} == *:* ]] || fail "RDZV_ENDPOINT=${RDZV_ENDPOINT:-} must be host:port of node 0."
    nodes="NNODES=$NNODES NODE_RANK=$NODE_RANK RDZV_ENDPOINT=$RDZV_ENDPOINT "
    rendezvous=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --rdzv-backend static --rdzv-endpoint "$RDZV_ENDPOINT")
fi

overrides=(--job.config_file "$CONFIG_FILE" "$@")
world_size=$((NNODES * NGPU))
dump_folder=$("$python" -m torchtitan_lite.config --world-size "$world_size" --get job.dump_folder "${overrides[@]}")
log_dir=$dump_folder/logs/$(date +%Y-%m-%dT%H-%M-%S)-${HOSTNAME:-node}
if ! problem=$(export LC_ALL=C && { mkdir -p "$log_dir" && : >"$log_dir/torchrun.log"; } 2>&1); then
    echo "run_train.sh: [job] dump_folder = \"$dump_folder\" cannot be written: $problem; name a folder that can." >&2
    [[ $problem =~ No\ space|[Qq]uota|Read-only ]] && exit 7
    exit 2
fi

export LOG_RANK=${LOG_RANK:-0} PYTHONUNBUFFERED=1 TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank${rank}] '
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > NGPU ? $(nproc) / NGPU : 1))}
# OpenMP threads that spin while they wait take the cores from those that work, where others load the machine too.
if ((devices == 0)); then export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-PASSIVE}; fi
if [[ -t 1 && -z ${NO_COLOR:-} ]]; then export FORCE_COLOR=1; fi # workers write to a pipe, whatever we write to

stop() { # SIGNAL
    if [[ -z $signalled ]]; then
        signalled=--signalled stopped_at=$SECONDS
        echo "run_train.sh: stopping, and saving where checkpoints are on; Ctrl-C, or another signal in 3 s, kills the run" >&2
        [[ -z $torchrun ]] || kill -TERM "$torchrun"
    elif [[ $1 == INT ]] || ((SECONDS - stopped_at > 3)); then
        pkill -KILL -P "$torchrun"
    fi
}

# With job control each job has a process group of its own: Ctrl-C reaches this script only, which passes it on once,
# because further signals make torchrun leave its workers behind. torchrun's stderr holds the workers' lines, shown
# at once, and its own report, which is a traceback also for a plain user error and so is kept for the end.
started=$(date +%s) signalled='' torchrun=''
trap 'stop INT || true' INT
trap 'stop TERM || true' TERM HUP
set -m
"$python" -m torchtitan_lite.launch "${rendezvous[@]}" --nproc-per-node "$NGPU" --max-restarts "$MAX_RESTARTS" \
    --log-dir "$log_dir" --tee 3 -m torchtitan_lite.train "${overrides[@]}" 2>"$log_dir/torchrun.log" &
torchrun=$!
[[ -z $signalled ]] || kill -TERM "$torchrun" # a signal came while it was being started
# In a subshell of its own: a trap that the shell runs while it starts a pipeline waits for what is started already.
(tail -n +1 -f -s 0.1 --pid "$torchrun" "$log_dir/torchrun.log" | grep --line-buffered '^\[rank' >&2) &
shown=$!
set +m
# A bare wait can miss a signal that comes just before it blocks. Nothing is ever written to this pipe, so reading from
# it is a short sleep without a process.
exec {never}<> <(:)
while kill -0 "$torchrun" 2>/dev/null; do read -rt 0.3 -u "$never" _ || true; done
exit_code=0
wait "$torchrun" 2>/dev/null || exit_code=$?
wait "$shown" || true
((exit_code == 0)) && exit
command="${nodes}CONFIG_FILE=$(printf '%q' "$CONFIG_FILE") NGPU=$NGPU$(printf ' %q' "$0" "$@")"
exec "$python" -m torchtitan_lite.run_folder "$dump_folder" --log-dir "$log_dir" --since "$started" $signalled \
    --torchrun "$exit_code" --torchrun-pid "$torchrun" --first-rank $((${NODE_RANK:-0} * NGPU)) --command "$command"
