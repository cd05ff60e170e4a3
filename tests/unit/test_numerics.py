"""What casts to float8 lose, held against hand-computed figures; whose they are; and that watching
changes nothing."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from sample_models import SMALL, on_meta, ready
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.float8 import float8_training_tensor
from torchao.float8.float8_utils import compute_error

from torchtitan_lite.base.torchao_types import is_float8_linear
from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.float8.numerics import (
    Numerics,
    NumericsMonitor,
    measure_cast,
    saturation_limit,
)
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing

# ----- saturation_limit, measure_cast, NumericsMonitor -----

ARGS = replace(SMALL, n_layers=3)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = [*(f"attention.w{i}" for i in "qkvo"), *(f"feed_forward.w{i}" for i in "123")]
NONE, OP = ActivationCheckpointConfig(mode="none"), ActivationCheckpointConfig()


@pytest.fixture(autouse=True)
def one_rank() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def build_model(
    recipe: str = "tensorwise", *, ac: ActivationCheckpointConfig = NONE, output: bool = False
) -> Transformer:
    model = on_meta(ARGS, recipe, convert_output=output)
    apply_activation_checkpointing(model, ac)
    return ready(model)


def float8_names(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if is_float8_linear(module)]
    return [name.replace("_checkpoint_wrapped_module.", "") for name in names]


def run(model: nn.Module, *, seed: int = 0) -> Tensor:
    """The loss of a forward and backward pass."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, ARGS.vocab_size, (2, 16), generator=generator)
    loss = model(tokens).square().mean()
    loss.backward()
    return loss


def monitor_of(model: nn.Module) -> NumericsMonitor:
    return NumericsMonitor(model, float8_names(model), device=torch.device("cpu"))


def measure(model: nn.Module, *, seeds: tuple[int, ...] = (0,)) -> Numerics:
    """The figures of a step of one microbatch for each of `seeds`."""
    monitor = monitor_of(model)
    with monitor.observe():
        for seed in seeds:
            run(model, seed=seed)
    return monitor.figures()


def flat(figures: Numerics) -> dict[tuple[str, str, str], float]:
    roles = [(kind, role, named) for kind, of in figures.items() for role, named in of.items()]
    return {(kind, role, name): named[name] for kind, role, named in roles for name in named}


def cast(tensor: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """`tensor` cast with one scale, and the scale."""
    scale = torch.finfo(dtype).max / tensor.abs().max()
    return (tensor * scale).to(dtype), scale


def sqnr_db(tensor: Tensor, dtype: torch.dtype = E4M3) -> float:
    data, scale = cast(tensor, dtype)
    return compute_error(tensor, data.float() / scale).item()


def test_a_value_is_cut_off_from_half_a_spacing_above_the_largest_number_on() -> None:
    types = E4M3, E5M2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    assert [saturation_limit(dtype) for dtype in types] == [464, 61440, 248, 61440]


def test_the_sums_of_a_cast() -> None:
    # To 448 are rounded 450, which is near, and cut off 480 and -500. Half of the least number is
    # 2**-10.
    values = torch.tensor([[0.0, 1.0625, -2.0, 0.0009], [450.0, 480.0, -500.0, 0.002]])
    rounded = torch.tensor([[0.0, 1.0, -2.0, 0.0], [448.0, 448.0, -448.0, 2.0**-9]])
    sums, amax = measure_cast(values / 4, rounded.to(E4M3), torch.tensor(4.0))
    signal = 1.0625**2 + 4 + 0.0009**2 + 450**2 + 480**2 + 500**2 + 0.002**2
    noise = 0.0625**2 + 0.0009**2 + 2**2 + 32**2 + 52**2 + (0.002 - 2**-9) ** 2
    assert sums.tolist() == pytest.approx([signal / 16, noise / 16, 1, 2, 8])
    assert amax == 125.0


def test_each_cast_is_counted_for_its_linear_and_role() -> None:
    model, seen = build_model(output=True), {}
    for name, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            linear.register_forward_pre_hook(
                lambda _, args, name=name: seen.update({(name, "input"): args[0]})
            )
            linear.register_full_backward_hook(
                lambda _, i, out, name=name: seen.update({(name, "grad_output"): out[0]})
            )
            seen[name, "weight"] = linear.weight
    figures = measure(model)
    assert list(figures) == [*KINDS, "output"]
    for kind, roles in figures.items():
        assert list(roles) == ["input", "weight", "grad_output"]
        layers = ["output"] if kind == "output" else [f"layers.{i}.{kind}" for i in range(3)]
        for role, measured in roles.items():
            tensors = [seen[layer, role].detach() for layer in layers]
            dtype = E5M2 if role == "grad_output" else E4M3
            ratios = [sqnr_db(tensor, dtype) for tensor in tensors]
            amaxes = [tensor.abs().max().item() for tensor in tensors]
            expected = {"sqnr_db": min(ratios), "amax": max(amaxes), "saturation": 0.0}
            if kind != "output":
                expected["sqnr_db_layer"] = ratios.index(min(ratios))
                expected["amax_layer"] = amaxes.index(max(amaxes))
                expected["saturation_layer"] = 0
            others = {name: measured[name] for name in measured if not name.startswith("underflow")}
            assert others == pytest.approx(expected, rel=1e-4)


def test_a_layer_with_an_outlier_is_told_by_its_underflow() -> None:
    model = build_model()
    weight = model.layers["1"].attention.wo.weight
    with torch.no_grad():
        weight[0, 0] = 3000.0
    figures = measure(model)["attention.wo"]["weight"]
    assert (figures["underflow_layer"], figures["amax_layer"], figures["amax"]) == (1, 1, 3000.0)
    # Half of the least number and what is below become 0.
    lost = (weight.abs() <= 2**-10 * 3000 / 448).sum().item() / weight.numel()
    assert figures["underflow"] == pytest.approx(lost) and lost > 0.1


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_the_worst(value: float) -> None:
    model = build_model()
    with torch.no_grad():
        model.layers["2"].feed_forward.w2.weight[0, 0] = value
    figures = measure(model)
    measured = figures["feed_forward.w2"]["weight"]
    assert (measured["sqnr_db"], measured["amax"]) == (-math.inf, math.inf)
    assert measured["sqnr_db_layer"] == measured["amax_layer"] == 2
    assert figures["feed_forward.w1"]["weight"]["sqnr_db"] > 25


def test_zeros_lose_nothing() -> None:
    model = build_model()
    for block in model.layers.values():
        nn.init.zeros_(block.attention.wk.weight)
    figures = measure(model)["attention.wk"]["weight"]
    assert (figures["sqnr_db"], figures["amax"], figures["underflow"]) == (math.inf, 0.0, 0.0)


@pytest.mark.parametrize(
    ("recipe", "mode"),
    [("tensorwise", "full"), ("tensorwise", "selective"), ("rowwise_with_gw_hp", "selective")],
)
def test_what_is_recomputed_changes_no_figure(recipe: str, mode: str) -> None:
    expected = flat(measure(build_model(recipe)))
    ac = ActivationCheckpointConfig.model_validate({"mode": mode})
    assert flat(measure(build_model(recipe, ac=ac))) == pytest.approx(expected, rel=1e-4)


def test_the_microbatches_of_a_step_count_together_and_those_of_others_do_not() -> None:
    model = build_model()
    first, second = flat(measure(model, seeds=(1,))), flat(measure(model, seeds=(2,)))
    both = flat(measure(model, seeds=(1, 2)))
    for key in [key for key in both if key[1:] == ("input", "amax")]:
        assert both[key] == max(first[key], second[key])
    monitor = monitor_of(model)
    for seed in (1, 2):
        with monitor.observe():
            run(model, seed=seed)
    assert flat(monitor.figures()) == pytest.approx(second)


@pytest.mark.parametrize(
    ("recipe", "ac"), [("tensorwise", NONE), ("rowwise", NONE), ("tensorwise", OP)]
)
def test_watching_changes_no_bit(recipe: str, ac: ActivationCheckpointConfig) -> None:
    plain, watched = build_model(recipe, ac=ac), build_model(recipe, ac=ac)
    with monitor_of(watched).observe():
        loss = run(watched)
    assert torch.equal(loss, run(plain))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_torchao_casts_as_before_after_a_step_also_after_one_that_failed() -> None:
    model = build_model()
    block = model.layers["0"]
    block.compile(backend="eager")
    function, compiled = float8_training_tensor._ToFloat8ConstrFunc, block._compiled_call_impl
    monitor = monitor_of(model)
    assert float8_training_tensor._ToFloat8ConstrFunc is function
    with pytest.raises(RuntimeError, match="out of data"), monitor.observe():
        assert float8_training_tensor._ToFloat8ConstrFunc is not function
        assert block._compiled_call_impl is None
        raise RuntimeError("out of data")
    assert float8_training_tensor._ToFloat8ConstrFunc is function
    assert block._compiled_call_impl is compiled


def test_a_compiled_model_is_measured_eagerly_and_compiled_once() -> None:
    model, expected = build_model(), flat(measure(build_model()))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    compiled = run(model)
    assert counter.frame_count == 1  # shared by the blocks
    assert flat(measure(model)) == pytest.approx(expected, rel=1e-4)
    assert torch.equal(run(model), compiled)
    assert counter.frame_count == 1
