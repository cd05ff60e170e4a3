"""What training and planning share: what "auto" chooses, and its refusal without a known device."""

import dataclasses
import itertools
from typing import Any

import pytest
from sample_jobs import job_of

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.devices import lookup_device
from torchtitan_lite.catalog.flavors import FLAVORS, ModelArgs
from torchtitan_lite.config import Config
from torchtitan_lite.config.job import Job
from torchtitan_lite.float8.selection import converted_names
from torchtitan_lite.planner.auto import choose_work, resolve_auto
from torchtitan_lite.planner.workload import build_workload

H100 = lookup_device("H100 SXM")
SHORT_8B = dataclasses.replace(FLAVORS["8B"], max_seq_len=8192)
AUTO_GATHERED = {"fsdp_reshard_after_forward": "auto"}


def config_of(
    sequences: int = 64,
    *,
    local: int = 1,
    checkpoint: str = "auto",
    dtype: str = "float32",
    compiled: bool = True,
    float8: dict[str, Any] | None = None,
    **parallelism: Any,
) -> Config:
    """8B on so many sequences a step, `local` at a time, in bf16 or with `float8`."""
    training = {"local_batch_size": local, "seq_len": 8192, "dtype": dtype}
    return Config.model_validate(
        {
            "model": {"flavor": "8B"},
            "training": training | {"global_batch_size": sequences},
            "compile": {"enable": compiled},
            "activation_checkpoint": {"mode": checkpoint},
            "parallelism": parallelism,
            "float8": float8 or {},
        }
    )


def job_8b(config: Config, ranks: int = 8) -> Job:
    return job_of(config, SHORT_8B, degrees=(1, ranks, 1))


def resolve(config: Config, args: ModelArgs = FLAVORS["8B"], *, tp: int = 1) -> Config:
    job = job_of(config, args, degrees=(1, 64, tp))
    return resolve_auto(job, device=H100, memory_gib=1e9).config


# ----- resolve_auto, choose_work -----


@pytest.mark.parametrize("device", [H100, None])
@pytest.mark.parametrize(
    ("memory_gib", "label", "says"),
    [
        (200, "none", "96.8 of 200.0 GiB, the fastest that fits"),
        (95, "selective 16", ""),
        (80, "selective 4", ""),
        (60, "selective", ""),
        (40, "full", "the fastest that fits"),
        (10, "full", "of 10.0 GiB, the smallest, too large"),
    ],
)
def test_auto_checkpointing_is_the_fastest_that_fits(memory_gib, label, says, device, caplog):
    job = job_of(config_of(128, local=2), FLAVORS["8B"], degrees=(1, 64, 1))
    with caplog.at_level("INFO"):
        resolved = resolve_auto(job, device=device, memory_gib=memory_gib).config
    assert resolved.activation_checkpoint.label == label
    assert f'[activation_checkpoint] mode: "auto" -> "{label.split()[0]}"' in caplog.text
    assert says in caplog.text and ("as for an H100 SXM" in caplog.text) == (device is None)


@pytest.mark.parametrize(
    ("sequences", "memory_gib", "checkpoint", "chosen"),
    [
        (8, 141, "auto", ("none", "never", "last")),
        (8, 70, "none", ("none", "default", "last")),
        # Two of 32 blocks are recomputed, to keep all weights.
        (8, 80, "auto", ("selective 16", "never", "last")),
        (128, 141, "auto", ("none", "never", "last")),
        # Whole float32 gradients are faster where they fit; every fourth block is recomputed.
        (128, 80, "auto", ("selective 4", "never", "each")),
    ],
)
def test_auto_chooses_what_is_recomputed_gathered_again_and_reduced_together(
    sequences, memory_gib, checkpoint, chosen
):
    config = config_of(sequences, checkpoint=checkpoint, **AUTO_GATHERED)
    job = resolve_auto(job_8b(config), device=H100, memory_gib=memory_gib)
    ac, sharding = job.config.activation_checkpoint, job.config.parallelism
    found = ac.label, sharding.fsdp_reshard_after_forward, sharding.fsdp_reduce_gradients
    assert found == chosen


def test_weights_of_pipelines_are_gathered_again_where_they_do_not_fit():
    config = config_of(8, checkpoint="none", **AUTO_GATHERED, pipeline_parallel_degree=2)
    job = job_of(config, SHORT_8B, degrees=(1, 4, 1), pp=2)
    job = resolve_auto(job, device=H100, memory_gib=1)
    assert job.config.parallelism.fsdp_reshard_after_forward == "always"


@pytest.mark.parametrize(
    ("ranks", "sequences", "dtype"),
    [(8, 8, "float32"), (1, 16, "float32"), (8, 128, "bfloat16")],
    ids=["one microbatch", "one rank", "sums in bf16"],
)
def test_auto_reduces_in_the_last_microbatch_where_each_is_no_alternative(ranks, sequences, dtype):
    job = job_8b(config_of(sequences, checkpoint="none", dtype=dtype), ranks)
    resolved = resolve_auto(job, device=H100, memory_gib=1).config
    assert resolved.parallelism.fsdp_reduce_gradients == "last"


def test_a_config_without_auto_is_returned_as_it_is() -> None:
    config = config_of(checkpoint="full", fsdp_reduce_gradients="each")
    assert resolve_auto(job_of(config), device=None, memory_gib=1e9).config == config


def test_70b_accumulates_gradients_on_64_gpus() -> None:
    args = dataclasses.replace(FLAVORS["3-70B"], max_seq_len=8192)
    job = job_of(config_of(8 * 64, **AUTO_GATHERED), args, degrees=(1, 64, 1))
    best = choose_work(job, device=H100, memory_gib=80)
    assert best.reserved_gib == pytest.approx(46.6, abs=0.1)
    assert best.job.config.parallelism.fsdp_reduce_gradients == "each"


def test_no_choice_that_fits_is_faster_by_more_than_a_half_percent() -> None:
    job, found = job_8b(config_of(128, **AUTO_GATHERED)), []
    for mode, reshard, reduce in itertools.product(
        ("none", "selective", "full"), ("never", "default"), ("last", "each")
    ):
        config = config_of(
            128, checkpoint=mode, fsdp_reshard_after_forward=reshard, fsdp_reduce_gradients=reduce
        )
        work = build_workload(job_8b(config))
        found.append((work.reserved_gib, work.time(H100).step_s))
    for memory_gib in (60, 80, 100, 150):
        best = choose_work(job, device=H100, memory_gib=memory_gib)
        assert best.reserved_gib <= memory_gib
        times = [step_s for reserved_gib, step_s in found if reserved_gib <= memory_gib]
        assert best.time(H100).step_s < 1.005 * min(times)


def test_auto_recomputes_no_block_that_a_model_does_not_have() -> None:
    args = dataclasses.replace(FLAVORS["8B"], n_layers=4)
    job, labels = job_of(config_of(8, **AUTO_GATHERED), args), set()
    for memory_gib in range(1, 60):
        best = choose_work(job, device=H100, memory_gib=memory_gib)
        labels.add(best.job.config.activation_checkpoint.label)
    assert {"none", "full"} < labels <= {"none", "selective 4", "selective 3", "selective", "full"}


# ----- filter_fqns -----


def auto_float8(*filters: str, compiled: bool = True, **float8: Any) -> Config:
    table = {"enable_float8_linear": True, "filter_fqns": ["auto", *filters]}
    return config_of(compiled=compiled, checkpoint="none", float8=table | float8)


def test_auto_needs_a_known_device_if_float8_is_on() -> None:
    job, message = job_of(auto_float8()), r'filter_fqns = \["auto"\] compares float8 with bf16'
    with pytest.raises(ConfigError, match=message):
        build_workload(job)
    with pytest.raises(ConfigError, match=message):
        resolve_auto(job, device=None, memory_gib=1e9)
    off = build_workload(job_of(auto_float8(enable_float8_linear=False)))
    reasons = {choice.kept_because for choice in off.choices if choice.kind != "output"}
    assert reasons == {"float8 is off"}


@pytest.mark.parametrize(
    ("filters", "tp", "kept"),
    [
        ((), 1, set()),
        (("layers.0", "w1"), 1, set()),
        # Casts cost more than small matmuls gain.
        (("wq", "wo", "w1", "w2", "w3"), 8, {"attention.wk", "attention.wv"}),
    ],
)
def test_resolved_filters_select_the_same_linears_without_a_data_sheet(filters, tp, kept, caplog):
    config = auto_float8(*filters)
    with caplog.at_level("INFO"):
        resolved = resolve(config, tp=tp)
    found = resolved.float8.filter_fqns
    assert found[: len(filters)] == filters
    assert "auto" not in found and kept <= {*found}
    assert all(f"{kind} (" in caplog.text for kind in kept)

    with_auto, without = (
        {*converted_names(work.choices)}
        for work in (
            build_workload(job_of(each, FLAVORS["8B"], degrees=(1, 1, tp)), device=device)
            for each, device in ((config, H100), (resolved, None))
        )
    )
    assert with_auto == without
    assert bool(without) == (tp == 1)


def test_output_is_not_converted_where_auto_keeps_it(caplog: pytest.LogCaptureFixture) -> None:
    args = dataclasses.replace(FLAVORS["8B"], vocab_size=50257)
    config = auto_float8(convert_output=True)
    with caplog.at_level("INFO"):
        resolved = resolve(config, args)
    assert "output (out_features 50257, not a multiple of 16)" in caplog.text
    assert (resolved.float8.filter_fqns, resolved.float8.convert_output) == ((), False)
    assert resolve(config).float8.convert_output


def test_float8_is_off_where_auto_converts_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        resolved = resolve(auto_float8(compiled=False))
    assert not resolved.float8.enable_float8_linear
    assert "x the time of bf16)" in caplog.text
    build_workload(job_of(resolved))
