"""Plan the published runs: `python tests/unit/published_plans.py > docs/published.md`.

The planner predicts this project's kernels. Runs of torchtitan moved more bytes, as counted in its
source: `TorchtitanRoofline` adds them.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from published_runs import MODELS, PUBLISHED_RUNS, PublishedRun

from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    Float8Config,
    ParallelDegrees,
    ParallelismConfig,
    TrainingConfig,
    resolve_batch,
    resolve_shares,
)
from torchtitan_lite.float8.recipes import DEFAULT_RECIPE
from torchtitan_lite.job import Job, TokenizerValues
from torchtitan_lite.metrics.devices import lookup_device
from torchtitan_lite.planner.meta_model import build_meta_model
from torchtitan_lite.planner.roofline import Cost, Passes, Roofline, build_roofline
from torchtitan_lite.planner.step import predict

RATIO_LIMIT, RATE_LIMIT = 12, 20  # percent
TOKENIZER = TokenizerValues(path="", vocab_size=2256, bos_id=1, fingerprint="")
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

OLD_ATTENTION = {"CDNA3": {"attention_flash": 0.16}}
"""AOTriton's before 0.11: 208 TFLOPS forward, AMD-AGI/Primus-Turbo, phase1-attention-report."""


class TorchtitanRoofline(Roofline):
    """torchtitan up to v0.2: rotary embeddings as complex numbers, which the compiler leaves to
    eager kernels in float32; repeated key-value heads; a loss on float32 logits, eager in 2024."""

    loss_bytes = 12  # per logit, compiled

    def pointwise(self) -> Passes:
        args, tp = self.job.model_args, self.job.degrees.tp
        # To float32, the product, and back: 20 bytes an element, of which ours moves 4.
        moved = 16 * (args.q_dim + args.kv_dim) // tp
        if args.n_kv_heads < args.n_heads:
            moved += 2 * 2 * (args.q_dim + args.kv_dim) // tp
        forward = self.move(self.tokens * moved, 6)
        ac, n_layers = self.job.config.activation_checkpoint, args.n_layers
        again = n_layers + len(ac.checkpointed_layers(n_layers))
        return super().pointwise() + Passes(forward * n_layers, forward * again)

    def loss(self) -> Cost:
        logits = self.tokens * self.job.model_args.vocab_size // self.job.degrees.tp
        return self.move(self.loss_bytes * logits, 12)


class EarlyRoofline(TorchtitanRoofline):
    """The same with an eager loss: cast, log-softmax, and the gradients of both in float32. Without
    compile, norms too are several kernels, of 40 bytes an element forward and 108 backward."""

    loss_bytes = 36

    def pointwise(self) -> Passes:
        args, n_layers = self.job.model_args, self.job.model_args.n_layers
        if self.compiled:
            return super().pointwise()
        elements = 2 * self.tokens * args.dim // self.job.degrees.tp
        forward, backward = self.move(36 * elements, 12), self.move(102 * elements, 26)
        again = len(self.job.config.activation_checkpoint.checkpointed_layers(n_layers))
        more = Passes(forward * n_layers, backward * n_layers + forward * again)
        return super().pointwise() + more


@dataclass(frozen=True)
class Planned:
    """A published run beside its prediction."""

    run: PublishedRun
    tps: float
    band: tuple[float, float]
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
    in_float8, sequences = run.recipe != "bf16", run.local_batch_size or 1
    whole = run.sharding == "optimizer"
    degrees = ParallelDegrees(*((1, run.dp) if whole else (run.dp_replicate, run.dp_shard)), run.tp)
    fused = run.compiled is not False or "NeMo" in run.framework
    config = Config(
        training=TrainingConfig(
            seq_len=run.seq_len,
            local_batch_size=sequences,
            global_batch_size=sequences * run.accumulation * run.dp,
        ),
        parallelism=ParallelismConfig(
            enable_async_tensor_parallel=run.async_tp,
            fsdp_reshard_after_forward="never" if whole else "default",
        ),
        activation_checkpoint=ActivationCheckpointConfig(
            **CHECKPOINTING[run.checkpointing or "op"]
        ),
        compile=CompileConfig(enable=fused),
        float8=Float8Config(
            enable_float8_linear=in_float8,
            recipe_name=run.recipe if in_float8 else DEFAULT_RECIPE,
            enable_fsdp_float8_all_gather=run.recipe == "tensorwise" and bool(run.float8_gather),
        ),
    )
    args = replace(MODELS[run.model], max_seq_len=run.seq_len)
    return Job(
        config=config,
        degrees=degrees,
        batch=resolve_batch(config.training, dp_degree=degrees.dp),
        dataset_shares=resolve_shares(config.training.datasets),
        model_args=replace(args, vocab_size=args.vocab_size or TOKENIZER.vocab_size),
        tokenizer=TOKENIZER,
    )


@cache
def plan_run(run: PublishedRun) -> Planned:
    """Predict the tokens per second per GPU of a published run, and those of its baseline."""
    device = lookup_device(run.device)
    assert device is not None
    job = job_of_run(run)
    meta = build_meta_model(job)
    roofline: Roofline = build_roofline(device, job, meta.recomputed)
    if "NeMo" in run.framework:
        roofline = replace(roofline, attention_kernel="cudnn")
    else:
        early = run.compiled is False or "2024" in run.framework
        theirs = EarlyRoofline if early else TorchtitanRoofline
        rates = replace(roofline.rates, **OLD_ATTENTION.get(device.architecture, {}))
        roofline = theirs(device, rates, job, meta.recomputed, "flash")
    prediction = predict(roofline, meta.choices)

    tokens = job.batch.global_batch_size * job.config.training.seq_len / job.degrees.world_size
    slow, fast = sorted(tokens / seconds for seconds in prediction.float8_s_band)
    baseline = next((each for each in PUBLISHED_RUNS if each.name == run.baseline), None)
    return Planned(
        run, tokens / prediction.float8.step_s, (slow, fast), baseline and plan_run(baseline)
    )
