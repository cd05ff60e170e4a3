"""Choose what stands for "auto" in a job: the linears in float8, what is recomputed, what stays
gathered, and when gradients are reduced."""

from collections.abc import Iterable, Sequence
from itertools import product

from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.devices import DeviceSpec, lookup_device
from torchtitan_lite.catalog.flavors import OUTPUT
from torchtitan_lite.config import AUTO
from torchtitan_lite.config.job import Job
from torchtitan_lite.config.keys import config_changes
from torchtitan_lite.float8.selection import LinearChoice

from .share import without_fsdp
from .workload import Workload, build_workload

CHECKPOINTING = (
    ("none", "op"),
    *(("selective", option) for option in ("16", "8", "4", "3", "op")),
    ("full", "op"),
)
"""Modes of activation checkpointing and their options to choose from. Every second block is
missing: "op" is faster, and keeps less."""
SAME_TIME = 1.005  # steps whose times differ by less are taken as equally fast
STAND_IN = "H100 SXM"  # choices are timed on it where there is no data sheet, as on CPU


def resolve_auto(job: Job, *, device: DeviceSpec | None, memory_gib: float) -> Job:
    """Replace each "auto" of the config by values chosen for these devices, and log the reasons.

    Models built from the result select the same linears, without `device`. If float8 would make no
    linear faster, it is off in the result. Raises ConfigError if [float8] filter_fqns = ["auto"]
    needs a data sheet and there is none.
    """
    float8, ac, before = job.config.float8, job.config.activation_checkpoint, job.config.to_toml()
    chooses_linears = float8.enable_float8_linear and AUTO in float8.filter_fqns
    sharding = job.config.parallelism
    if AUTO in (ac.mode, sharding.fsdp_reshard_after_forward, sharding.fsdp_reduce_gradients):
        work = choose_work(job, device=device, memory_gib=memory_gib)
        job = work.job
        values = ", ".join(config_changes(before, job.config.to_toml()))
        fitting = work.reserved_gib <= memory_gib
        fits = "the fastest that fits" if fitting else "the smallest, too large"
        stand_in = "" if device else f", as for an {STAND_IN} (CPUs are not planned)"
        memory = f"{work.reserved_gib:.1f} of {memory_gib:.1f} GiB"
        logger.info(f'in place of "auto": {values}; {memory}, {fits}{stand_in}')
    if not chooses_linears:
        return job

    choices = build_workload(job, device=device).choices
    reasons = ", ".join(f"{kind} ({reason})" for kind, reason in _kept_by_auto(choices).items())
    logger.info(f'[float8] filter_fqns = ["auto"] keeps in high precision: {reasons or "nothing"}')
    return name_kept(job, choices)


def choose_work(job: Job, *, device: DeviceSpec | None, memory_gib: float) -> Workload:
    """Return the workload with the values in place of "auto", but for linears, that need the least
    memory of those that should fit and are as fast as the fastest, and recompute no more; if none
    fits, the smallest."""
    ac, spec = job.config.activation_checkpoint, device or lookup_device(STAND_IN)
    assert spec is not None, "DEVICES has the stand-in"
    modes: Sequence[tuple[str, str]] = [(ac.mode, ac.selective_ac_option)]
    if ac.mode == AUTO:
        n_layers = job.model_args.n_layers
        modes = [each for each in CHECKPOINTING if each[1] == "op" or int(each[1]) <= n_layers]

    # Which linears are better in float8 hardly depends on the choice: it is decided for the first.
    linears, tried = None, []
    for mode, (reshard, reduction) in product(modes, _shardings(job)):
        chosen = job.choose("activation_checkpoint", mode=mode[0], selective_ac_option=mode[1])
        chosen = chosen.choose(
            "parallelism", fsdp_reshard_after_forward=reshard, fsdp_reduce_gradients=reduction
        )
        work = build_workload(chosen, device=device, choices=linears)
        linears = work.choices
        tried.append(work)
    fitting = [work for work in tried if work.reserved_gib <= memory_gib]
    if not fitting:
        return min(tried, key=lambda work: work.reserved_gib)

    # Nothing more is recomputed for less memory.
    timed = [(work, work.time(spec).step_s) for work in fitting]
    fastest, least_s = min(timed, key=lambda each: each[1])
    as_fast = [
        work
        for work, step_s in timed
        if step_s < SAME_TIME * least_s and len(work.recomputed) <= len(fastest.recomputed)
    ]
    return min(as_fast, key=lambda work: work.reserved_gib)


def _shardings(job: Job) -> Iterable[tuple[str, str]]:
    """Return the values of fsdp_reshard_after_forward and fsdp_reduce_gradients to choose from.

    Without pipelines "always" has the peak memory of "default", and is slower; in pipelines
    "default" and "never" are the same. "each" is left out where it would mean the same as "last",
    or would add up gradients in bf16."""
    sharding, pipelined = job.config.parallelism, job.degrees.pp > 1
    reshard, reduction = [sharding.fsdp_reshard_after_forward], [sharding.fsdp_reduce_gradients]
    if AUTO in reshard:
        reshard = ["default", "always"] if pipelined else ["never", "default"]
        reshard = ["default"] if without_fsdp(job) else reshard
    if AUTO in reduction:
        same = job.batch.grad_accum_steps == 1 or pipelined or without_fsdp(job)
        in_bf16 = job.config.training.dtype == "bfloat16"
        reduction = ["last"] if same or in_bf16 else ["last", "each"]
    return product(reshard, reduction)


def name_kept(job: Job, choices: Sequence[LinearChoice]) -> Job:
    """Replace "auto" in [float8] filter_fqns by the names of the linears that it keeps in bf16,
    and switch float8 off if no linear is left."""
    float8, kept = job.config.float8, _kept_by_auto(choices)
    patterns = [pattern for pattern in float8.filter_fqns if pattern != AUTO]
    return job.choose(
        "float8",
        filter_fqns=(*patterns, *(kind for kind in kept if kind != OUTPUT)),
        enable_float8_linear=any(choice.converted for choice in choices),
        convert_output=float8.convert_output and OUTPUT not in kept,
    )


def _kept_by_auto(choices: Sequence[LinearChoice]) -> dict[str, str]:
    """Return the kinds that no other filter keeps in high precision, each with the reason."""
    return {
        choice.kind: choice.kept_because
        for choice in choices
        if choice.kept_because and not choice.kept_because.startswith("filter_fqns")
    }
