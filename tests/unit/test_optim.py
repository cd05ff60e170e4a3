"""The optimizer's update, its moments in few bits, and the steps that have no update."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_lite.checkpoint.manifest import NEW_RUN
from torchtitan_lite.config import OptimizerConfig, TrainingConfig
from torchtitan_lite.training import bfloat16_adamw, optim
from torchtitan_lite.training.optim import (
    UpdateGuard,
    build_optimizer,
    clip_gradients,
    parameter_groups,
    step_unless,
)

SETTINGS = [
    *({"implementation": implementation} for implementation in ("fused", "foreach", "for-loop")),
    {"state_dtype": "bfloat16"},
    {"name": "Adam", "implementation": "fused"},
]

# ----- build_optimizer, step_unless, BFloat16AdamW -----


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_settings_reach_the_optimizer(settings: dict[str, str]) -> None:
    config = OptimizerConfig(lr=0.1, beta2=0.9, eps=1e-6, weight_decay=0.2, **settings)
    found = build_optimizer([nn.Parameter(torch.ones(3))], config).defaults
    expected = {"lr": 0.1, "betas": (0.9, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    assert {key: found[key] for key in expected} == expected
    if name := settings.get("implementation"):
        assert (found["fused"], found["foreach"]) == (name == "fused", name == "foreach")


def test_adam_adds_the_weight_decay_to_the_gradient_and_goes_on_from_adamw() -> None:
    def stepped(weight: torch.Tensor, name: Any, state: Any = None) -> tuple[torch.Tensor, Any]:
        parameter = nn.Parameter(weight.clone())
        optimizer = build_optimizer([parameter], OptimizerConfig(name=name, weight_decay=0.5))
        if state:
            optimizer.state[parameter] |= {key: each.clone() for key, each in state.items()}
        parameter.grad = torch.ones(3)
        optimizer.step()
        return parameter.detach(), optimizer.state[parameter]

    weight, (beta1, beta2, lr) = torch.tensor([-4.0, 1.0, 2.0]), (0.9, 0.95, 8e-4)
    gradient = 1 + 0.5 * weight  # of the second step too, but for the change of the first
    found, moments = stepped(weight, "Adam")
    torch.testing.assert_close(found, weight - lr * gradient.sign())
    torch.testing.assert_close(moments["exp_avg"], (1 - beta1) * gradient)

    decoupled, state = stepped(weight, "AdamW")
    torch.testing.assert_close(decoupled, weight * (1 - lr * 0.5) - lr)
    gradient = 1 + 0.5 * decoupled
    mean = beta1 * (1 - beta1) + (1 - beta1) * gradient
    square = beta2 * (1 - beta2) + (1 - beta2) * gradient**2
    change = (mean / (1 - beta1**2)) / (square / (1 - beta2**2)).sqrt()
    torch.testing.assert_close(stepped(decoupled, "Adam", state)[0], decoupled - lr * change)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_step_that_is_not_finite_changes_nothing(settings: dict[str, str]) -> None:
    def trained(found_inf: list[float]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 256))
        optimizer = build_optimizer([weight], OptimizerConfig(**settings))
        for found in found_inf:
            weight.grad = torch.randn(3, 256) if not found else torch.full((3, 256), math.nan)
            step_unless(optimizer, torch.tensor(found))
        return weight.detach(), optimizer.state[weight]

    weight, state = trained([0.0, 1.0, 0.0])
    expected, expected_state = trained([0.0, 0.0])
    assert torch.equal(weight, expected) and weight.isfinite().all()
    assert state.keys() == expected_state.keys() and state["step"] == 2
    assert all(torch.equal(state[name], expected_state[name]) for name in state)


@pytest.mark.parametrize(("settings", "reads"), [*zip(SETTINGS, (0, 1, 1, 0, 0), strict=True)])
def test_what_decides_on_the_device(settings, reads, monkeypatch):
    weight = nn.Parameter(torch.ones(3))
    optimizer = build_optimizer([weight], OptimizerConfig(**settings))
    weight.grad = torch.ones(3)
    step_unless(optimizer, torch.tensor(0.0))  # makes the state
    read, item = [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda x: read.append(x) or item(x))
    found_inf = torch.tensor(0.0)
    step_unless(optimizer, found_inf)
    assert sum(tensor is found_inf for tensor in read) == reads


def updates(state_dtype: str, *, steps: int) -> tuple[torch.Tensor, Any]:
    """Return the change of a weight after `steps` steps, and its optimizer state. The gradients are
    random, of very different magnitudes in different rows."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64, 256))
    optimizer = build_optimizer(
        [weight], OptimizerConfig(state_dtype=state_dtype, lr=1e-2, weight_decay=0.0)
    )
    sizes = torch.logspace(-6, 0, 64).view(-1, 1)
    for _ in range(steps):
        weight.grad = torch.randn(64, 256) * sizes
        step_unless(optimizer, torch.tensor(0.0))
    return weight.detach(), optimizer.state[weight]


def test_an_update_on_a_gpu_is_compiled_by_the_backend(monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda update, **options: compiled.append(options))
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(3, device="cuda"))
        build_optimizer([weight], OptimizerConfig(state_dtype="bfloat16"), backend="eager")
    assert compiled == [{"dynamic": False, "backend": "eager"}]


def test_weights_in_bfloat16_are_rounded_once() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 256, dtype=torch.bfloat16))
    expected = nn.Parameter(weight.detach().float())
    gradient = torch.randn_like(weight)
    for parameter, settings in ((weight, {"state_dtype": "bfloat16"}), (expected, {})):
        parameter.grad = gradient.to(parameter.dtype)
        optimizer = build_optimizer([parameter], OptimizerConfig(lr=0.1, **settings))
        step_unless(optimizer, torch.tensor(0.0))
    assert (weight != expected.bfloat16()).float().mean() <= 0.001


def test_moments_in_bfloat16_update_nearly_as_float32_does() -> None:
    expected, _ = updates("float32", steps=20)
    found, state = updates("bfloat16", steps=20)
    assert (found - expected).norm() / expected.norm() < 0.01
    assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
    first, _ = updates("bfloat16", steps=1)  # computed before anything is rounded
    torch.testing.assert_close(first, updates("float32", steps=1)[0])


def test_a_second_moment_falls_with_its_gradients() -> None:
    def second_moment(state_dtype: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.zeros(8, 256))
        optimizer = build_optimizer([weight], OptimizerConfig(state_dtype=state_dtype, beta2=0.999))
        for step in range(720):
            weight.grad = torch.randn(8, 256, generator=generator)
            if step >= 20:
                weight.grad[:, ::2] /= 100  # of each block a half
            step_unless(optimizer, torch.tensor(0.0))
        return optimizer.state[weight]["exp_avg_sq"].float()

    expected, found = second_moment("float32"), second_moment("bfloat16")
    for half, rel in ((0, 0.1), (1, 0.05)):
        mean = expected[:, half::2].mean().item()
        assert found[:, half::2].mean() == pytest.approx(mean, rel=rel)


def test_stochastic_rounding_is_right_on_average() -> None:
    def rounded(x: torch.Tensor, step: int) -> torch.Tensor:
        return bfloat16_adamw._round_stochastically(x, torch.tensor(float(step))).float()

    x, eps = torch.logspace(-4, 4, 1000), torch.finfo(torch.bfloat16).eps
    errors = torch.stack([rounded(x, step) for step in range(512)]) / x - 1
    assert errors.mean(0).abs().max() < eps / 8  # 5 standard errors at most
    assert abs(errors.mean()) < eps / 500
    assert (errors.abs() < eps).all()  # a neighbour, never one further
    exact = x.to(torch.bfloat16).float()
    assert torch.equal(rounded(exact, 3), exact)


def test_stochastic_rounding_has_no_constant_that_triton_refuses() -> None:
    graph = make_fx(bfloat16_adamw._round_stochastically)(torch.ones(8), torch.ones(()))
    constants = [value for node in graph.graph.nodes for value in node.args if type(value) is int]
    assert len(constants) > 5 and all(-(2**31) <= value < 2**31 for value in constants)


def test_the_compiled_update_is_the_eager_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = updates("bfloat16", steps=3)
    compiled = torch.compile(bfloat16_adamw._update, dynamic=False, fullgraph=True)
    monkeypatch.setattr(bfloat16_adamw, "_update", compiled)
    found, _ = updates("bfloat16", steps=3)
    # A moment near the middle may be rounded otherwise.
    assert (found - expected).norm() / expected.norm() < 1e-3


# ----- parameter_groups -----
NAMES = (
    "tok_embeddings.weight",
    "layers.0.attention_norm.weight",
    "layers.0._checkpoint_wrapped_module.attention.wq.weight",
    "layers.10.feed_forward.w2.weight",
    "norm.weight",
)


def test_parameters_are_one_group_by_default() -> None:
    named = {name: nn.Parameter(torch.ones(1)) for name in NAMES}
    (group,) = parameter_groups(named.items(), OptimizerConfig(weight_decay=0.2))
    assert group["params"] == [*named.values()]
    assert (group["weight_decay"], group["lr_factor"]) == (0.2, 1.0)
    assert group["param_names"][2] == "layers.0.attention.wq.weight"


def test_parameter_groups_have_their_own_decay_and_learning_rate() -> None:
    config = OptimizerConfig(
        no_decay=["norm", "layers.1"],
        lr_factors={"tok_embeddings": 0.5, "layers.0": 0.25, "wq": 2.0},
    )
    groups = parameter_groups([(name, nn.Parameter(torch.ones(1))) for name in NAMES], config)
    found = {
        name.removesuffix(".weight"): (group["weight_decay"], group["lr_factor"])
        for group in groups
        for name in group["param_names"]
    }
    assert found == {
        "tok_embeddings": (0.1, 0.5),
        "layers.0.attention_norm": (0.0, 0.25),
        "layers.0.attention.wq": (0.1, 0.5),
        "layers.10.feed_forward.w2": (0.1, 1.0),
        "norm": (0.0, 1.0),
    }


@pytest.mark.parametrize("settings", [*SETTINGS, {"name": "Muon"}])
def test_groups_decay_and_learn_by_themselves(settings: dict[str, str]) -> None:
    """With gradients of zero only the decay changes a weight."""
    config = OptimizerConfig(
        lr=0.5, weight_decay=0.5, no_decay=["norm"], lr_factors={"wq": 0.5}, **settings
    )
    shapes = {"layers.0.attention.wq": (4, 2), "layers.0.attention.wk": (2, 4), "norm": (4,)}
    named = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    optimizer = build_optimizer(parameter_groups(named.items(), config), config)
    for group in optimizer.param_groups:
        group["lr"] = 0.5 * group["lr_factor"]
    for weight in named.values():
        weight.grad = torch.zeros_like(weight)
    step_unless(optimizer, torch.tensor(0.0))
    changed = [bool((weight != 1).any()) for weight in named.values()]
    assert changed == [True, True, False]
    if config.name != "Adam":  # whose decay is a gradient
        assert [weight.flatten()[0].item() for weight in named.values()] == [0.875, 0.75, 1.0]


# ----- Muon -----
SHAPES = {
    "layers.0.attention.wk.weight": (24, 64),
    "layers.0.attention.wo.weight": (64, 64),
    "layers.1.feed_forward.w1.weight": (160, 64),
    "layers.1.ffn_norm.weight": (64,),
    "output.weight": (90, 64),
}


def orthogonal(momentum: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz iterations with the coefficients of Jordan's quintic polynomial."""
    x = momentum.bfloat16()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_muon_is_the_papers_for_matrices_of_blocks_and_adamw_for_the_rest(
    implementation: Any,
) -> None:
    torch.manual_seed(0)
    lr, decay = 2e-2, 0.1
    config = OptimizerConfig(name="Muon", lr=lr, implementation=implementation)
    named = {name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = build_optimizer(parameter_groups(named.items(), config), config)
    torchs = {name: nn.Parameter(weight.detach().clone()) for name, weight in named.items()}
    plain = {name: weight.detach().clone() for name, weight in named.items()}
    sums = {name: torch.zeros_like(weight) for name, weight in plain.items()}
    matrices = [*SHAPES][:3]
    muon = torch.optim.Muon([torchs[name] for name in matrices], lr, adjust_lr_fn="match_rms_adamw")
    rest = [weight for name, weight in torchs.items() if name not in matrices]
    adamw = torch.optim.AdamW(rest, lr, (0.9, 0.95), weight_decay=decay)

    for found_inf in (0.0, 1.0, 0.0, 0.0):
        gradients = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        for name, weight in named.items():
            weight.grad = gradients[name] * (math.nan if found_inf else 1)
            torchs[name].grad = gradients[name]
        step_unless(optimizer, torch.tensor(found_inf))
        if found_inf:
            continue
        muon.step()
        adamw.step()
        for name in matrices:
            sums[name] = 0.95 * sums[name] + gradients[name]
            update = orthogonal(gradients[name] + 0.95 * sums[name])
            scale = 0.2 * math.sqrt(max(update.shape))
            plain[name] -= lr * (scale * update + decay * plain[name])

    for name, weight in named.items():
        torch.testing.assert_close(weight, torchs[name], rtol=1e-5, atol=1e-7)
    for name in matrices:  # in bfloat16, iterations in another order round otherwise
        change = lr * 3 * 0.2 * math.sqrt(max(SHAPES[name]))
        assert (named[name] - plain[name]).abs().max() < 0.01 * change
    assert {name: {*optimizer.state[weight]} for name, weight in named.items()} == {
        name: {"momentum_buffer"} if name in matrices else {"step", "exp_avg", "exp_avg_sq"}
        for name in SHAPES
    }


def test_a_muon_update_is_as_large_as_adamws() -> None:
    torch.manual_seed(0)
    for shape in ((512, 128), (128, 512), (256, 256)):
        config = OptimizerConfig(name="Muon", lr=1.0, weight_decay=0.0)
        weight = nn.Parameter(torch.zeros(shape))
        groups = parameter_groups([("layers.0.attention.wq.weight", weight)], config)
        optimizer = build_optimizer(groups, config)
        weight.grad = torch.randn(shape)
        step_unless(optimizer, torch.tensor(0.0))
        assert weight.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def test_muon_decides_on_the_device_whether_to_update(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OptimizerConfig(name="Muon")
    named = {name: nn.Parameter(torch.ones(shape)) for name, shape in SHAPES.items()}
    optimizer = build_optimizer(parameter_groups(named.items(), config), config)
    for weight in named.values():
        weight.grad = torch.ones_like(weight)
    monkeypatch.setattr(torch.Tensor, "item", lambda x: pytest.fail("waits for the device"))
    step_unless(optimizer, torch.tensor(0.0))


def test_muon_keeps_weights_and_momentum_in_bfloat16() -> None:
    torch.manual_seed(0)
    config = OptimizerConfig(name="Muon", lr=1e-2)
    start, gradient = torch.randn(32, 64).bfloat16(), torch.randn(32, 64).bfloat16()
    updated = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = nn.Parameter(start.to(dtype, copy=True))
        groups = parameter_groups([("layers.0.attention.wq.weight", weight)], config)
        optimizer = build_optimizer(groups, config)
        weight.grad = gradient.to(dtype)
        step_unless(optimizer, torch.tensor(0.0))
        assert optimizer.state[weight]["momentum_buffer"].dtype is dtype
        updated.append(weight.detach())
    assert torch.equal(updated[0], updated[1].bfloat16())


# ----- UpdateGuard, clip_gradients -----
ONE, TWO = SimpleNamespace(size=lambda: 1), SimpleNamespace(size=lambda: 2)


def guarded(
    losses: list[float],
    norms: list[float] | None = None,
    *,
    factor: float = 0.0,
    group: Any = ONE,
    **before: Any,
) -> tuple[UpdateGuard, list[float]]:
    """A guard after steps of such losses and gradient norms, and what it said of each."""
    progress = replace(NEW_RUN, skipped_steps=3, **before)
    training = TrainingConfig(loss_spike_factor=factor)
    guard = UpdateGuard(training, progress, device=torch.device("cpu"), group=group)
    pairs = zip(losses, norms or [1.0] * len(losses), strict=True)
    return guard, [guard.found_inf(*map(torch.tensor, pair)).item() for pair in pairs]


def test_a_loss_or_gradient_that_is_not_finite_has_no_update_and_counts() -> None:
    guard, skipped = guarded([8.0, math.nan, math.inf, 8.0, 8.0], [1.0, 1.0, 1.0, math.nan, 1.0])
    assert skipped == [0, 1, 1, 1, 0]
    assert guard.skipped_steps == 3 + 3 and guard.consecutive_skips == 0
    assert guarded([8.0, 8.0, math.nan, math.nan])[0].consecutive_skips == 2


def test_a_spike_is_measured_against_the_mean_of_the_losses_that_counted() -> None:
    guard, skipped = guarded([2.0, 4.0, 6.2, 6.0, math.nan], factor=3.0)
    assert skipped == [0, 0, 1, 0, 1]  # 3 * (0.98 * 2 + 0.02 * 4) = 6.12
    assert guard.loss_mean.item() == pytest.approx(0.98 * 2.04 + 0.02 * 6.0)
    assert guarded([2.0, 200.0])[1] == [0, 0]  # without a factor none counts

    # The mean and the counts go on where they were.
    guard, skipped = guarded([5.5, 4.5], factor=2.0, consecutive_skips=4, loss_mean=2.5)
    assert skipped == [1, 0]
    assert guarded([5.5], factor=2.0, consecutive_skips=4, loss_mean=2.5)[0].consecutive_skips == 5


def test_a_step_that_another_replica_skips_has_no_update(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = iter([0.0, 1.0])  # of the other one

    def exchange(skipped: torch.Tensor, op: Any, group: Any) -> None:
        assert (op, group) == (optim.dist.ReduceOp.MAX, TWO)
        skipped.clamp_(min=next(decisions))

    monkeypatch.setattr(optim.dist, "all_reduce", exchange)
    guard, skipped = guarded([2.0, 4.0], group=TWO)
    assert skipped == [0, 1]
    assert (guard.skipped_steps, guard.consecutive_skips, guard.loss_mean) == (4, 1, 2)


@pytest.mark.parametrize("max_norm", [1.0, 1e3])
def test_gradients_are_clipped_as_by_torch(max_norm: float) -> None:
    torch.manual_seed(0)
    ours, reference = nn.Linear(64, 64), nn.Linear(64, 64)
    for weight, other in zip(ours.parameters(), reference.parameters(), strict=True):
        weight.grad = torch.randn_like(weight)
        other.grad = weight.grad.clone()
    norm = clip_gradients(ours.parameters(), max_norm, stages=ONE)
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    torch.testing.assert_close(norm, expected)
    for weight, other in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad)


def test_the_norm_of_many_gradients_on_cpu_is_not_too_small() -> None:
    weight = nn.Parameter(torch.empty(20_000_000))
    weight.grad = torch.full_like(weight, 0.1)
    norm = clip_gradients([weight], 1e6, stages=ONE)
    assert norm.item() == pytest.approx(0.1 * math.sqrt(weight.numel()), rel=1e-5)


def test_the_norm_of_shards_is_over_all_of_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    reduced = []

    def all_reduce(squares: torch.Tensor, group: Any) -> None:
        reduced.append(dist.get_process_group_ranks(group))
        squares.add_(16)  # of the other ranks

    monkeypatch.setattr(optim.dist, "all_reduce", all_reduce)
    layouts = [[Replicate(), Shard(0)], [Replicate(), Replicate()], [Replicate(), Shard(0)]]
    weights = []
    for layout, value in zip(layouts, (1.0, 2.0, 3.0), strict=True):
        gradient = DTensor.from_local(torch.tensor([value]), mesh, layout)
        weights.append(nn.Parameter(torch.zeros_like(gradient)))
        weights[-1].grad = gradient
    norm = clip_gradients(weights, 1e6, stages=ONE)
    assert reduced == [[0, 1]] and norm.item() == pytest.approx(math.sqrt(1 + 9 + 16 + 4))


def test_the_norm_of_a_pipeline_is_over_all_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([0.0, 3.0])
    # The other stage's gradients have a norm of 4.
    monkeypatch.setattr(optim.dist, "all_reduce", lambda squares, group: squares.add_(16))
    norm = clip_gradients([weight], 1.0, stages=TWO)
    assert norm.item() == 5.0
    torch.testing.assert_close(weight.grad, torch.tensor([0.0, 0.6]))
