"""Plan the published runs: `python tests/unit/published_plans.py > docs/published.md`.

The planner predicts this project's kernels. Those of torchtitan and others move more bytes, as
counted in its source and in what torch's compiler makes by itself: `TorchtitanRoofline` and `CASTS`
have them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any

from published_runs import MODELS, PUBLISHED_RUNS, PublishedRun
from sample_jobs import TOKENIZER, job_of

from torchtitan_lite.catalog.devices import lookup_device
from torchtitan_lite.catalog.recipes import DEFAULT_RECIPE
from torchtitan_lite.config import Config
from torchtitan_lite.config.job import Job
from torchtitan_lite.planner.constants import (
    RATE_RANGE,
    SPEEDUP_RANGE,
    SPLIT_RATE_RANGE,
    Casts,
    rates_of,
)
from torchtitan_lite.planner.time import Roofline, time_step
from torchtitan_lite.planner.workload import Workload, build_workload

RATIO_LIMIT, RATE_LIMIT = 12, 20  # percent
CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {"mode": "none"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "layer": {"mode": "selective", "selective_ac_option": "2"},
    "full": {"mode": "full"},
}

# Runs that the planner should not hit, by the start of their names.
UNKNOWN = {
    "#1185": "its batch is not published",
    "IBM": "its batch and checkpointing are not published",
    "#778": "its machine is not published",
    "AO B200": "its cards were power limited, the watts are not published",
    "FMS": "FSDP1 of early 2024, eager",
    "#1191": "whether it was compiled is not published",
    "T2024-08": "whether it was compiled is not published",
}

FITTED = "MI300X"
"""The device whose runs set a constant, `in_training`, so that their rates test nothing."""
OLD_ATTENTION = {"CDNA3": {"attention_flash": 0.21}}
"""AOTriton's before 0.11 is 1.2 to 1.6 times as slow: pytorch/pytorch#161754."""


# Casts of compiled blocks without this project's changes of the compiler's
# choices, counted as those in planner/constants.py.
CASTS = {
    "tensorwise": Casts(input=(3, 6.6), grad_output=6.5, weight=9.5),
    "rowwise": Casts(input=(-0.4, 11.5), grad_output=28, weight=14),
    "rowwise_with_gw_hp": Casts(input=(1.3, 0), grad_output=1.7, weight=9.5),
}


class OthersRoofline(Roofline):
    """The recipes as they run elsewhere."""

    attention = "cudnn"

    @property
    def runs_attention_in(self) -> str:
        return self.attention

    @property
    def casts(self) -> Casts:
        theirs = CASTS.get(self.job.config.float8.recipe_name)
        return theirs if theirs and self.compiled else super().casts


class TorchtitanRoofline(OthersRoofline):
    """torchtitan up to v0.2: rotary embeddings as complex numbers, which the compiler leaves to
    eager kernels in float32; repeated key-value heads; a loss on float32 logits, eager in 2024."""

    attention = "flash"
    loss_bytes = 12  # per logit, compiled

    @property
    def weight_bytes(self) -> float:  # type: ignore[override]
        gathered = self.job.config.float8.enable_fsdp_float8_all_gather
        return 0.0 if gathered else self.casts.weight

    def pointwise_s(self) -> float:
        args, tp = self.job.model_args, self.job.degrees.tp
        # To float32, the product, and back: 20 bytes an element, of which ours moves 4.
        moved = 16 * (args.q_dim + args.kv_dim) // tp
        if args.n_kv_heads < args.n_heads:
            moved += 2 * 2 * (args.q_dim + args.kv_dim) // tp
        passes = 2 * args.n_layers + self.checkpointed
        more = passes * self.move_s(self.job.microbatch_tokens * moved)
        if self.compiled:
            # The gradients of the norms' weights are kernels of their own.
            more += args.n_layers * self.move_s(2 * self.job.microbatch_tokens * 7 * args.dim // tp)
        return super().pointwise_s() + more

    def loss_s(self) -> float:
        logits = self.job.microbatch_tokens * self.job.model_args.vocab_size // self.job.degrees.tp
        return self.move_s(self.loss_bytes * logits)


class EarlyRoofline(TorchtitanRoofline):
    """The same with an eager loss: cast, log-softmax, and the gradients of both in float32. Without
    compile, norms too are several kernels, of 40 bytes an element forward and 108 backward."""

    loss_bytes = 36

    def pointwise_s(self) -> float:
        args = self.job.model_args
        if self.compiled:
            return super().pointwise_s()
        elements = 2 * self.job.microbatch_tokens * args.dim // self.job.degrees.tp
        forward, backward = self.move_s(36 * elements), self.move_s(102 * elements)
        more = (args.n_layers + self.checkpointed) * forward + args.n_layers * backward
        return super().pointwise_s() + more


@dataclass(frozen=True)
class Planned:
    """A published run beside its prediction."""

    run: PublishedRun
    tps: float
    baseline: "Planned | None"

    @property
    def error(self) -> float:
        """Percent by which the prediction is above the published rate."""
        return 100 * (self.tps / self.run.tps - 1)

    @property
    def ratios(self) -> tuple[float, float] | None:
        """The published and the predicted ratio to the run in bf16."""
        if self.baseline is None:
            return None
        return self.run.tps / self.baseline.run.tps, self.tps / self.baseline.tps

    @property
    def ratio_error(self) -> float | None:
        """Percent by which the predicted ratio is above the published one."""
        return self.ratios and 100 * (self.ratios[1] / self.ratios[0] - 1)

    @property
    def unknown(self) -> str:
        """What of the run is not published; "" if the planner should hit it."""
        return next((why for name, why in UNKNOWN.items() if self.run.name.startswith(name)), "")


def job_of_run(run: PublishedRun) -> Job:
    """Return the run as a job of this project, which shards weights where Megatron shards the
    optimizer only."""
    assert run.seq_len is not None, "every run that can be planned has a published length"
    in_float8, sequences = run.recipe != "bf16", run.local_batch_size or 1
    whole = run.sharding == "optimizer"
    replicas, shards = (1, run.dp) if whole else (run.dp_replicate, run.dp_shard)
    degrees = replicas, shards, run.tp
    fused = run.compiled is not False or "NeMo" in run.framework
    args, vp, passes = MODELS[run.model], run.vp or 1, run.accumulation
    tables = {
        "training": {
            "seq_len": run.seq_len,
            "local_batch_size": sequences * (passes if run.pp > 1 else 1),
            "global_batch_size": sequences * passes * run.dp,
        },
        "parallelism": {
            "context_parallel_degree": run.cp,
            "pipeline_parallel_degree": run.pp,
            "pipeline_parallel_schedule": "Interleaved1F1B" if vp > 1 else "1F1B",
            "pipeline_parallel_microbatch_size": sequences,
            "module_fqns_per_model_part": divide_blocks(args.n_layers, run.pp * vp),
            "enable_async_tensor_parallel": run.async_tp,
            "fsdp_reshard_after_forward": "never" if whole else "default",
            "fsdp_reduce_gradients": "last" if whole or run.pp > 1 else "each",
        },
        "activation_checkpoint": CHECKPOINTING[run.checkpointing or "op"],
        "compile": {"enable": fused},
        "float8": {
            "enable_float8_linear": in_float8,
            "recipe_name": run.recipe if in_float8 else DEFAULT_RECIPE,
            "enable_fsdp_float8_all_gather": run.recipe == "tensorwise" and bool(run.float8_gather),
        },
    }
    config = Config.model_validate(tables)
    vocab_size = args.vocab_size or TOKENIZER.vocab_size
    args = replace(args, max_seq_len=run.seq_len, vocab_size=vocab_size)
    return job_of(config, args, degrees=degrees, cp=run.cp, pp=run.pp)


def divide_blocks(n_layers: int, stages: int) -> tuple[tuple[str, ...], ...]:
    """Return the modules of so many equal stages, of which the ends have less blocks if need be;
    () for one."""
    each = -(-n_layers // stages)
    less = (each * stages - n_layers) // 2
    begins = [0, *(each * stage - less for stage in range(1, stages)), n_layers]
    blocks = [tuple(f"layers.{i}" for i in range(*ends)) for ends in pairwise(begins)]
    blocks[0] = ("tok_embeddings", *blocks[0])
    blocks[-1] = (*blocks[-1], "norm", "output")
    return tuple(blocks) if stages > 1 else ()


@cache
def plan_run(run: PublishedRun) -> Planned:
    """Predict the tokens per second per GPU of a published run, and those of its baseline."""
    work, roofline, tokens = _prepare(run)
    step_s = time_step(roofline, work.choices, work.converted).step_s
    baseline = next((each for each in PUBLISHED_RUNS if each.name == run.baseline), None)
    return Planned(run, tokens / step_s, plan_run(baseline) if baseline else None)


def published_over_predicted() -> dict[str, list[float]]:
    """Return the figures behind each of RANGES: of rates without context or pipeline parallelism,
    of rates with them, and of speedups of float8. A rate that set a constant is left out."""
    planned = [plan_run(run) for run in PUBLISHED_RUNS]
    known = [each for each in planned if not each.unknown and each.run.device != FITTED]
    rates = {
        "RATE_RANGE": [each for each in known if not each.run.in_stages],
        "SPLIT_RATE_RANGE": [each for each in known if each.run.in_stages],
    }
    found = {name: [each.run.tps / each.tps for each in runs] for name, runs in rates.items()}
    found["SPEEDUP_RANGE"] = [each.ratios[0] / each.ratios[1] for each in planned if each.ratios]
    return found


@cache
def _prepare(run: PublishedRun) -> tuple[Workload, Roofline, float]:
    """Return the work of a run, the roofline of who published it, and tokens of a step per GPU."""
    device = lookup_device(run.device)
    assert device is not None
    job = job_of_run(run)
    work = build_workload(job)
    tokens = job.batch.global_batch_size * job.config.training.seq_len / job.degrees.world_size
    if "NeMo" in run.framework:
        nemo = OthersRoofline(device, rates_of(device), job, work.recomputed)
        return work, nemo, tokens
    early = run.compiled is False or "2024" in run.framework
    theirs = EarlyRoofline if early else TorchtitanRoofline
    rates = replace(rates_of(device), **OLD_ATTENTION.get(device.architecture, {}))
    return work, theirs(device, rates, job, work.recomputed), tokens


def format_page() -> str:
    """Return docs/published.md."""
    planned = [plan_run(run) for run in PUBLISHED_RUNS]
    known = [each for each in planned if not each.unknown]
    kinds = {
        "plain": [each for each in known if not each.run.in_stages],
        "split": [each for each in known if each.run.in_stages],
        "unknown": [each for each in planned if each.unknown],
    }
    tested = {
        name: [each for each in runs if each.run.device != FITTED] for name, runs in kinds.items()
    }
    fitted = [each for each in planned if each.run.device == FITTED]
    errors = {name: [abs(each.error) for each in runs] for name, runs in tested.items()}
    ratios = [abs(each.ratio_error) for each in planned if each.ratio_error is not None]
    return PAGE.format(
        **{f"{name}_rows": _table(runs) for name, runs in kinds.items()},
        summary="\n".join(
            [
                _summary("tokens/s, plain layouts", errors["plain"], RATE_LIMIT, RATE_RANGE),
                _summary("tokens/s, CP or PP", errors["split"], RATE_LIMIT, SPLIT_RATE_RANGE),
                _summary("tokens/s, conditions not published", errors["unknown"], RATE_LIMIT),
                _summary("tokens/s, all", sum(errors.values(), []), RATE_LIMIT),
                _summary("speedup of float8", ratios, RATIO_LIMIT, SPEEDUP_RANGE),
            ]
        ),
        fast=sum(each.error > 0 for each in tested["plain"]),
        plain=len(tested["plain"]),
        fitted=len(fitted),
        fitted_ends=_ends([each.error for each in fitted]),
    )


def _summary(figure: str, errors: Sequence[float], limit: int, ends: Sequence[float] = ()) -> str:
    near = sum(error <= limit for error in errors)
    shown = " to ".join(f"{each:.2f}" for each in ends)
    return (
        f"| {figure} | {len(errors)} | {median(errors):.1f} % | {near} within {limit} % | {shown} |"
    )


def _table(runs: Sequence[Planned]) -> str:
    """A row for each source and device, with the range of its errors."""
    groups: dict[tuple[str, str, str], list[Planned]] = {}
    for each in runs:
        key = each.run.source, each.run.framework, each.run.device
        groups.setdefault(key, []).append(each)
    rows = []
    for (source, framework, device), members in groups.items():
        gains = [each.ratio_error for each in members if each.ratio_error is not None]
        errors = [each.error for each in members]
        why = f"; {members[0].unknown}" if members[0].unknown else ""
        rows.append(
            f"| {source}; {framework}{why} | {device} | {len(members)} | {_ends(errors)} | "
            f"{_ends(gains) if gains else ''} |"
        )
    return "\n".join(rows)


def _ends(errors: Sequence[float]) -> str:
    low, high = f"{min(errors):+.0f}", f"{max(errors):+.0f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def format_rows() -> str:
    """Return a line for each run: name, published and predicted rate, error, and ratios."""
    lines = []
    for planned in map(plan_run, PUBLISHED_RUNS):
        ratios = "  {:.2f} {:.2f}".format(*planned.ratios) if planned.ratios else ""
        rates = f"{planned.run.tps:10,.0f} {planned.tps:10,.0f} {planned.error:+6.1f} %"
        lines.append(f"{planned.run.name:42} {rates}{ratios}")
    return "\n".join(lines)


PAGE = """\
# The planner against published runs

`python tests/unit/published_plans.py > docs/published.md` generates this page, and a test checks
that it is current. With `--rows` the program prints each run instead. None of these runs is ours.
`tests/unit/published_runs.csv` and `.toml` have every setting of each run, and each doubt about it.

| figure | runs | median error | near | range |
| --- | ---: | ---: | --- | --- |
{summary}

A plan prints a range behind each rate and each speedup. The planner multiplies the predicted value
by the two numbers in the last column, which hold the middle 80 % of the published values
(`torchtitan_lite/planner/constants.py`). Runs whose source leaves out a condition, such as the
batch, count for no range of rates: the last table has them.

- The planner predicts {fast} of the {plain} rates of plain layouts too fast.
- The rates of the {fitted} runs on MI300X are in no row above. They set a constant, the time of
  AMD's kernels in training over their time alone (`in_training`), and are {fitted_ends} off with
  it. They are of one machine, and no other run tests the constant. A plan's range there is that of
  plain layouts.
- The planner never says that float8 helps where it cost a published run more than 5 %, and never
  says that it hurts where a run gained more than 5 %.
- Many runs are alike: they are releases of one framework, or the same machine twice.

The planner's constants come from data sheets and from measurements of single kernels and
collectives. They were committed before the first comparison with these runs. That comparison showed
what the model lacked, so this is not a blind test of today's model. Only the ranges and
`in_training` of AMD's GPUs are fitted to the runs.

The planner predicts this project's kernels, but on this page it predicts those of other projects.
It assumes the casts to float8 and the norms that torch's compiler makes by itself. For torchtitan
it adds what its code moved: rotary embeddings in float32, repeated key-value heads, and a loss that
is not fused.

## Without context or pipeline parallelism

The table has the errors of rates, and the errors of speedups where the source has a run in bf16.

| source and framework | device | runs | rate | speedup |
| --- | --- | ---: | --- | --- |
{plain_rows}

## With context or pipeline parallelism

torchtitan did not publish the number of microbatches of its pipelines. The planner takes 8, as many
as pipeline ranks, which was the default of its code. With context parallelism torchtitan passed
keys and values around a ring, where this project gathers them, and something else slowed it down.
It knows that Transformer Engine, as this project, casts weights once a step; torchao casts them in
each microbatch. Yet it predicts the gain of float8 in NVIDIA's runs too small; why is not known.

| source and framework | device | runs | rate | speedup |
| --- | --- | ---: | --- | --- |
{split_rows}

## Runs whose conditions are not published

These runs were set apart after the first comparison, because their sources leave out a condition.
Their speedups count in the range of speedups.

| source and framework; settings that are not known | device | runs | rate | speedup |
| --- | --- | ---: | --- | --- |
{unknown_rows}
"""


if __name__ == "__main__":
    print(format_rows() if "--rows" in sys.argv else format_page().rstrip())
