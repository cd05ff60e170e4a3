"""What "auto" becomes in a job: the linears in float8, what is recomputed, what stays gathered, and
when gradients are reduced. Also the layouts that would fit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from torchtitan_lite.base.logger import logger
from torchtitan_lite.catalog.devices import DeviceSpec, lookup_device
from torchtitan_lite.catalog.flavors import OUTPUT
from torchtitan_lite.config import sequence_parts
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.selection import AUTO, LinearChoice

from .rank import without_fsdp
from .workload import Workload, build_workload

CHECKPOINTING = (
    ("none", "op"),
    *(("selective", option) for option in ("16", "8", "4", "3", "op")),
    ("full", "op"),
)
"""Modes of activation checkpointing and their options to choose from, mostly from the fastest to
the smallest. Every second block is missing: "op" is faster, and keeps less."""
RESHARDING = ("never", "default")
"""Values of fsdp_reshard_after_forward to choose from, in the same order. Without pipelines
"always" has the peak memory of "default", and is slower."""
RESHARDING_IN_PIPELINES = ("default", "always")
"""In pipelines "default" and "never" are the same."""
SAME_TIME = 1.005
"""Steps whose times differ by less are taken as equally fast."""
STAND_IN = "H100 SXM"
"""The device by which choices are timed where there is no data sheet, as on CPU."""
NODE_TP_DEGREES = (2, 4, 8)  # within a node, whose links are fast


def resolve_auto(
    job: Job, *, device: DeviceSpec | None, memory_gib: float, on_cpu: bool = False
) -> Job:
    """Replace each "auto" of the config by values chosen for these devices, and log the reasons.

    Models built from the result select the same linears, without `device`. If float8 would make no
    linear faster, it is off in the result. Raises ConfigError if [float8] filter_fqns = ["auto"]
    needs a data sheet and there is none.
    """
    float8, ac = job.config.float8, job.config.activation_checkpoint
    chooses_linears = float8.enable_float8_linear and AUTO in float8.filter_fqns
    reductions = _reductions(job)
    if len(reductions) == 1:
        job = job.choose("parallelism", fsdp_reduce_gradients=reductions[0])
    sharding = job.config.parallelism
    if AUTO in (ac.mode, sharding.fsdp_reshard_after_forward, sharding.fsdp_reduce_gradients):
        best, *others = kept_options(job, device=device, memory_gib=memory_gib, on_cpu=on_cpu)
        after = f"the fastest other: {others[0]}" if others else "no other fits"
        if best.reserved_gib > memory_gib:
            after = f"the smallest, and even that may not fit {memory_gib:.1f} GiB"
        stand_in = "" if device else f" (times of an {STAND_IN})"
        logger.info(f'"auto" is {best} of {memory_gib:.1f} GiB; {after}{stand_in}')
        job = best.work.job
    if not chooses_linears:
        return job

    choices = build_workload(job, device=device).choices
    reasons = ", ".join(f"{kind} ({reason})" for kind, reason in _kept_by_auto(choices).items())
    logger.info(f'[float8] filter_fqns = ["auto"] keeps in high precision: {reasons or "nothing"}')
    return name_kept(job, choices)


class KeptOption(NamedTuple):
    """A choice of what is recomputed, what stays gathered and when gradients are reduced."""

    work: Workload
    step_s: float
    reserved_gib: float

    def __str__(self) -> str:
        ac, sharding = self.work.job.config.activation_checkpoint, self.work.job.config.parallelism
        reduced = ""
        if self.work.job.batch.grad_accum_steps > 1:
            reduced = f', fsdp_reduce_gradients "{sharding.fsdp_reduce_gradients}"'
        return (
            f'activation_checkpoint "{ac.label}", fsdp_reshard_after_forward '
            f'"{sharding.fsdp_reshard_after_forward}"{reduced}: {self.step_s:.4g} s a step, '
            f"{self.reserved_gib:.1f} GiB"
        )


def kept_options(
    job: Job,
    *,
    device: DeviceSpec | None,
    memory_gib: float,
    attention_kernel: str = "",
    on_cpu: bool = False,
) -> list[KeptOption]:
    """Return the choices in place of "auto" for [activation_checkpoint] mode and [parallelism]
    fsdp_reshard_after_forward and fsdp_reduce_gradients whose step should fit: the best, then the
    others by time. If none fits, return the smallest. The best is the smallest of those that are as
    fast as the fastest, and recompute no more.

    Without a data sheet they are timed on a stand-in: what is recomputed or gathered again takes
    time on every device."""
    ac, sharding = job.config.activation_checkpoint, job.config.parallelism
    by_mode = _checkpointing(job.model_args.n_layers)
    modes = by_mode if ac.mode == AUTO else [(ac.mode, ac.selective_ac_option)]
    values: Sequence[str] = [sharding.fsdp_reshard_after_forward]
    if values[0] == AUTO:
        values = RESHARDING_IN_PIPELINES if job.degrees.pp > 1 else RESHARDING
        if without_fsdp(job):
            values = ["default"]
    spec = device or lookup_device(STAND_IN)
    assert spec is not None, "DEVICES has the stand-in"

    # Which linears are better in float8 hardly depends on the choice: it is decided for the first.
    choices, tried = None, []
    for (mode, option), each, reduction in product(modes, values, _reductions(job)):
        chosen = job.choose("activation_checkpoint", mode=mode, selective_ac_option=option)
        chosen = chosen.choose(
            "parallelism", fsdp_reshard_after_forward=each, fsdp_reduce_gradients=reduction
        )
        work = build_workload(chosen, device=device, choices=choices)
        choices = work.choices
        tried.append((work, work.reserved_gib(on_cpu=on_cpu)))

    # Only what fits is timed.
    smallest = min(tried, key=lambda each: each[1])
    fitting = [
        KeptOption(work, work.time(spec, attention_kernel).step_s, reserved_gib)
        for work, reserved_gib in [each for each in tried if each[1] <= memory_gib] or [smallest]
    ]
    fitting.sort(key=lambda each: each.step_s)

    # Nothing more is recomputed for less memory.
    fastest = fitting[0]
    fast = [
        each
        for each in fitting
        if each.step_s < SAME_TIME * fastest.step_s
        and len(each.work.recomputed) <= len(fastest.work.recomputed)
    ]
    best = min(fast, key=lambda each: each.reserved_gib)
    return [best, *(each for each in fitting if each is not best)]


def _checkpointing(n_layers: int) -> list[tuple[str, str]]:
    """Return those of CHECKPOINTING that a model of `n_layers` blocks can have."""
    return [
        (mode, option)
        for mode, option in CHECKPOINTING
        if not option.isdecimal() or int(option) <= n_layers
    ]


def _reductions(job: Job) -> Sequence[str]:
    """Return the values of fsdp_reduce_gradients to choose from: "last" where "each" would mean the
    same, or would add up gradients in bf16."""
    value, training = job.config.parallelism.fsdp_reduce_gradients, job.config.training
    if value != AUTO:
        return [value]
    same = job.batch.grad_accum_steps == 1 or job.degrees.pp > 1 or without_fsdp(job)
    return ["last"] if same or training.dtype == "bfloat16" else ["last", "each"]


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


def turn_on_float8(job: Job, *, filter_fqns: Sequence[str]) -> Job:
    """Turn float8 on where it pays, beside the filters given. Keys that the recipe excludes have no
    effect while float8 is off, and are dropped."""
    float8, recipe = job.config.float8, job.config.float8.recipe
    return job.choose(
        "float8",
        enable_float8_linear=True,
        enable_fsdp_float8_all_gather=(
            float8.enable_fsdp_float8_all_gather and recipe.gathers_float8
        ),
        scale_gradients_in_matmul=float8.scale_gradients_in_matmul and recipe.scales_in_matmul,
        filter_fqns=(*filter_fqns, AUTO),
    )


def _kept_by_auto(choices: Sequence[LinearChoice]) -> dict[str, str]:
    """Return the kinds that no other filter keeps in high precision, each with the reason."""
    return {
        choice.kind: choice.kept_because
        for choice in choices
        if choice.kept_because and not choice.kept_because.startswith("filter_fqns")
    }


def find_fitting(work: Workload, memory_gib: float) -> list[dict[str, Any]]:
    """Return layouts that would fit, the fastest first: each needs fewer GPUs than those before, by
    recomputing more, or by more tensor parallelism."""
    args, degree = work.job.model_args, work.job.degrees.tp
    # What "auto" chose for this layout need not be best for others: they take what needs least.
    in_bf16 = work.job.config.training.dtype == "bfloat16"
    least = {
        "fsdp_reshard_after_forward": "default",
        "fsdp_reduce_gradients": "last" if in_bf16 else "each",
    }
    chosen = {key: least[key] for key in least if f"parallelism.{key}" in work.job.chosen}
    work = replace(work, job=work.job.choose("parallelism", **chosen))
    tokens = args.max_seq_len // sequence_parts(cp=work.job.degrees.cp, tp=1)
    divided = math.gcd(args.n_heads, args.n_kv_heads, args.dim, args.ffn_dim, tokens)
    higher = [tp for tp in NODE_TP_DEGREES if tp > degree and divided % tp == 0]
    found: list[dict[str, Any]] = []
    for tp, (mode, option) in product((degree, *higher), _checkpointing(args.n_layers)):
        job = work.job.choose("activation_checkpoint", mode=mode, selective_ac_option=option)
        gpus = _fewest_gpus(replace(work, job=job), tp, memory_gib)
        if gpus and (not found or gpus < found[-1]["world_size"]):
            label = job.config.activation_checkpoint.label
            layout = {"activation_checkpoint": label, "tensor_parallel_degree": tp}
            found.append({"world_size": gpus} | layout)
    return found


def _fewest_gpus(work: Workload, tp: int, memory_gib: float) -> int | None:
    """Return the number of GPUs from which on the shards are small enough; None if no number is."""
    job = work.job
    least = max(1, job.degrees.dp_shard * job.degrees.tp // tp)
    for shards in (2**k * least for k in range(12)):
        degrees = replace(job.degrees, dp_shard=shards, tp=tp)
        if replace(work, job=replace(job, degrees=degrees)).reserved_gib() <= memory_gib:
            return degrees.world_size
    return None
