"""What casts to float8 lose, held against hand-computed figures; whose they are; and that watching
changes nothing."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, float8_training_tensor
from torchao.float8.float8_utils import compute_error

from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.float8.numerics import NumericsMonitor, measure_cast, saturation_limit
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.init import init_weights
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.torchao_types import is_float8_linear

ARGS = ModelArgs(
    dim=32, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=48, vocab_size=40, max_seq_len=16
)
CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = [f"attention.{name}" for name in ("wq", "wk", "wv", "wo")] + [
    f"feed_forward.w{i}" for i in (1, 2, 3)
]
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
NONE = ActivationCheckpointConfig(mode="none")


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build_model(
    recipe: str = "tensorwise", *, ac: ActivationCheckpointConfig = NONE, output: bool = False
) -> Transformer:
    with torch.device("meta"):
        model = Transformer(ARGS)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: output or name != "output"
    )
    apply_activation_checkpointing(model, ac)
    model.to_empty(device="cpu")
    init_weights(model, seed=0)
    return model


def float8_names(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if is_float8_linear(module)]
    return [name.replace("_checkpoint_wrapped_module.", "") for name in names]


def run(model: nn.Module, *, seed: int = 0) -> Tensor:
    """The loss of a forward and backward pass."""
    tokens = torch.randint(
        0, ARGS.vocab_size, (2, 16), generator=torch.Generator().manual_seed(seed)
    )
    loss = model(tokens).square().mean()
    loss.backward()
    return loss


def measure(
    model: nn.Module, *, seeds: tuple[int, ...] = (0,)
) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of a step of one microbatch for each of `seeds`."""
    monitor = NumericsMonitor(model, float8_names(model), freq=1, device=CPU)
    with monitor.observe():
        for seed in seeds:
            run(model, seed=seed)
    return monitor.figures()


def flat(figures: dict[str, dict[str, dict[str, float]]]) -> dict[tuple[str, str, str], float]:
    return {
        (kind, role, name): value
        for kind, roles in figures.items()
        for role, named in roles.items()
        for name, value in named.items()
    }


def cast(tensor: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    """`tensor` cast with one scale, and the scale."""
    scale = torch.finfo(dtype).max / tensor.abs().max()
    return (tensor * scale).to(dtype), scale


def sqnr_db(tensor: Tensor, dtype: torch.dtype = E4M3) -> float:
    data, scale = cast(tensor, dtype)
    return compute_error(tensor, data.float() / scale).item()


@pytest.mark.parametrize(
    ("dtype", "limit"),
    [(E4M3, 464), (E5M2, 61440), (torch.float8_e4m3fnuz, 248), (torch.float8_e5m2fnuz, 61440)],
    ids=str,
)
def test_a_value_is_cut_off_from_half_a_spacing_above_the_largest_number_on(
    dtype: torch.dtype, limit: float
) -> None:
    assert saturation_limit(dtype) == limit


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


def test_a_row_has_a_scale_of_its_own() -> None:
    values = torch.tensor([[1.0, -2.0], [3e-5, 1e-5]], dtype=torch.bfloat16)
    scale = torch.tensor([[224.0], [2.0**23]])
    data = (values * scale).to(E4M3)
    sums, _ = measure_cast(values, data, scale)
    assert sums[2:].tolist() == [0, 0, 4]
    assert sums[1] == pytest.approx(
        ((values.double() - data.double() / scale) ** 2).sum().item(), rel=1e-4
    )


@given(
    seed=st.integers(0, 2**32), exponent=st.integers(-30, 30), dtype=st.sampled_from([E4M3, E5M2])
)
def test_the_ratio_is_torchaos_at_any_magnitude(
    seed: int, exponent: int, dtype: torch.dtype
) -> None:
    values = torch.randn(64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    data, scale = cast(values, dtype)
    (signal, noise, _, saturated, _), amax = measure_cast(values, data, scale)
    assert 10 * math.log10(signal / noise) == pytest.approx(sqnr_db(values, dtype), abs=1e-3)
    assert (saturated, amax) == (0, values.abs().max())


@pytest.mark.usefixtures("one_rank")
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
        for role, measured in roles.items():
            layers = ["output"] if kind == "output" else [f"layers.{i}.{kind}" for i in range(3)]
            tensors = [seen[layer, role].detach() for layer in layers]
            ratios = [
                sqnr_db(tensor, E5M2 if role == "grad_output" else E4M3) for tensor in tensors
            ]
            amaxes = [tensor.abs().max().item() for tensor in tensors]
            expected = {"sqnr_db": min(ratios), "amax": max(amaxes), "saturation": 0.0}
            if kind != "output":
                layers_of = {
                    "sqnr_db": ratios.index(min(ratios)),
                    "amax": amaxes.index(max(amaxes)),
                    "saturation": 0,
                }
                expected |= {f"{name}_layer": layer for name, layer in layers_of.items()}
            others = {name: measured[name] for name in measured if not name.startswith("underflow")}
            assert others == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("one_rank")
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


@pytest.mark.usefixtures("one_rank")
def test_a_layer_with_values_between_two_float8_numbers_is_told_by_its_ratio() -> None:
    model = build_model()
    with torch.no_grad():
        weight = model.layers["2"].feed_forward.w3.weight.fill_(
            432.0
        )  # in the middle of 416 and 448
        weight[0, 0] = 448.0  # for a scale of 1
    figures = measure(model)["feed_forward.w3"]["weight"]
    assert (figures["sqnr_db"], figures["sqnr_db_layer"]) == (
        pytest.approx(20 * math.log10(432 / 16), abs=0.01),
        2,
    )


@pytest.mark.usefixtures("one_rank")
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


@pytest.mark.usefixtures("one_rank")
def test_zeros_lose_nothing() -> None:
    model = build_model()
    for block in model.layers.values():
        nn.init.zeros_(block.attention.wk.weight)
    figures = measure(model)["attention.wk"]["weight"]
    assert (figures["sqnr_db"], figures["amax"], figures["underflow"]) == (math.inf, 0.0, 0.0)


@pytest.mark.usefixtures("one_rank")
def test_a_scale_a_row_loses_less_than_one_a_tensor_where_rows_differ() -> None:
    least = {}
    for recipe in RECIPES:
        model = build_model(recipe)
        with torch.no_grad():
            model.layers["0"].feed_forward.w1.weight[0] *= 1000
        figures = measure(model)
        assert {tuple(roles) for roles in figures.values()} == {("input", "weight", "grad_output")}
        least[recipe] = figures["feed_forward.w1"]["grad_output"]["sqnr_db"]
    # Both gradients of a row-wise recipe are of the type with more digits.
    assert least["tensorwise"] < 27 < 29 < min(least["rowwise"], least["rowwise_with_gw_hp"])


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_what_is_recomputed_changes_no_figure(recipe: str, mode: str) -> None:
    expected = flat(measure(build_model(recipe)))
    ac = ActivationCheckpointConfig.model_validate({"mode": mode})
    assert flat(measure(build_model(recipe, ac=ac))) == pytest.approx(expected, rel=1e-4)


@pytest.mark.usefixtures("one_rank")
def test_the_microbatches_of_a_step_count_together_and_those_of_others_do_not() -> None:
    model = build_model()
    first, second = flat(measure(model, seeds=(1,))), flat(measure(model, seeds=(2,)))
    both = flat(measure(model, seeds=(1, 2)))
    inputs = [key for key in both if key[1] == "input"]
    for key in [key for key in inputs if key[2] == "amax"]:
        assert both[key] == max(first[key], second[key])
    for key in [key for key in inputs if key[2] == "underflow"]:
        assert both[key] <= (first[key] + second[key]) / 2 + 1e-9  # of the worst layer
    assert any(first[key] != second[key] for key in inputs)
    monitor = NumericsMonitor(model, float8_names(model), freq=1, device=CPU)
    for seed in (1, 2):
        with monitor.observe():
            run(model, seed=seed)
    assert flat(monitor.figures()) == pytest.approx(second)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ac", [NONE, ActivationCheckpointConfig()], ids=["no AC", "op AC"])
def test_watching_changes_no_bit(recipe: str, ac: ActivationCheckpointConfig) -> None:
    plain, watched = build_model(recipe, ac=ac), build_model(recipe, ac=ac)
    with NumericsMonitor(watched, float8_names(watched), freq=1, device=CPU).observe():
        loss = run(watched)
    assert torch.equal(loss, run(plain))
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_torchao_casts_as_before_after_a_step_also_after_one_that_failed() -> None:
    model = build_model()
    model.layers["0"].compile(backend="eager")
    function, compiled = (
        float8_training_tensor._ToFloat8ConstrFunc,
        model.layers["0"]._compiled_call_impl,
    )
    monitor = NumericsMonitor(model, float8_names(model), freq=1, device=CPU)
    assert float8_training_tensor._ToFloat8ConstrFunc is function
    with pytest.raises(RuntimeError, match="out of data"), monitor.observe():
        assert float8_training_tensor._ToFloat8ConstrFunc is not function
        assert model.layers["0"]._compiled_call_impl is None
        raise RuntimeError("out of data")
    assert float8_training_tensor._ToFloat8ConstrFunc is function
    assert model.layers["0"]._compiled_call_impl is compiled


@pytest.mark.usefixtures("one_rank")
def test_a_compiled_model_is_measured_eagerly_and_compiled_once() -> None:
    model, expected = build_model(), flat(measure(build_model()))
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    compiled = run(model)
    assert counter.frame_count == 1  # shared by the blocks
    assert flat(measure(model)) == pytest.approx(expected, rel=1e-4)
    assert torch.equal(run(model), compiled)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("freq", "steps"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6])])
def test_steps_to_measure(freq: int, steps: list[int]) -> None:
    model = build_model()
    monitor = NumericsMonitor(model, float8_names(model), freq=freq, device=CPU)
    assert [step for step in range(1, 8) if monitor.due(step)] == steps


def test_a_model_without_float8_has_nothing_to_measure() -> None:
    assert not NumericsMonitor(nn.Linear(2, 2), [], freq=1, device=CPU).due(1)
