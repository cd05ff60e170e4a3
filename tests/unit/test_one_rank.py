"""One data-parallel rank trains as FSDP2 would, bit by bit, with one copy of each weight a step."""

from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sample_models import SMALL, on_meta, ready
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.float8_training_tensor import GemmInputRole

from torchtitan_lite.base.torchao_types import data_of, is_float8_tensor
from torchtitan_lite.config import (
    ActivationCheckpointConfig,
    CompileConfig,
    Float8Config,
    OptimizerConfig,
    ParallelDegrees,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan_lite.float8.convert import update_scales
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel import parallelize as parallel
from torchtitan_lite.parallel.fsdp import start_microbatch
from torchtitan_lite.parallel.mesh import build_mesh
from torchtitan_lite.patches import observe_float8_casts
from torchtitan_lite.training.optim import build_optimizer

# ----- needs_no_fsdp, apply_mixed_precision, WeightCopies -----

ARGS = replace(SMALL, ffn_dim=128, vocab_size=128, max_seq_len=32)
TOKENS = torch.arange(3 * 64).reshape(3, 2, 32) * 7 % 128  # of three microbatches
TENSORWISE = {"recipe_name": "tensorwise"}
GATHERED = TENSORWISE | {"enable_fsdp_float8_all_gather": True}
ROWWISE, MXFP8 = {"recipe_name": "rowwise"}, {"recipe_name": "mxfp8"}


@pytest.fixture(autouse=True)
def alone() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


@dataclass(frozen=True)
class Case:
    microbatches: int = 1
    tp: int = 1  # of two ranks, that of this process and one that sends nothing
    tied: bool = False
    ac: str = "none"
    compiled: bool = False
    float8: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    reshard: str = "default"

    @property
    def parallelism(self) -> ParallelismConfig:
        return ParallelismConfig.model_validate({"fsdp_reshard_after_forward": self.reshard})

    def build(self) -> Transformer:
        training = TrainingConfig(seq_len=32, local_batch_size=2, **self.training)
        args = replace(ARGS, tie_embeddings=self.tied)
        model = on_meta(args, dtype=getattr(torch, training.dtype), **self.float8)
        parallel.parallelize(
            [model],
            build_mesh(ParallelDegrees(1, 1, 1, self.tp), device_type="cpu"),
            parallelism=self.parallelism,
            activation_checkpoint=ActivationCheckpointConfig.model_validate({"mode": self.ac}),
            compile=CompileConfig(enable=self.compiled),
            training=training,
            microbatches=self.microbatches,
            flash=False,
        )
        return ready(model)


def local(tensor: Tensor) -> Tensor:
    """Without DTensor, and without torchao's wrapper."""
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return getattr(tensor, "_tensor", tensor).detach()


def loss(model: Transformer, tokens: Tensor) -> Tensor:
    cross_entropy = CrossEntropy(compiled=False)
    total: Tensor = model(tokens, partial(cross_entropy, labels=tokens, scale=1 / 64))
    return total


def train(case: Case, model: Transformer, *, steps: int = 3) -> list[Tensor]:
    """The losses, with a validation after each step, the gradient norms, and the last weights."""
    optimizer = build_optimizer(model.parameters(), OptimizerConfig(lr=1e-2))
    float8 = Float8Config(enable_float8_linear=bool(case.float8), **case.float8)
    update_scales(model, float8)
    seen = []
    for _ in range(steps):
        for i in range(case.microbatches):
            start_microbatch(model, case.parallelism, last=i == case.microbatches - 1)
            total = loss(model, TOKENS[i])
            total.backward()
            seen.append(total.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        seen.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model, float8)
        with torch.no_grad():
            seen.append(loss(model, TOKENS[0]))
    # FSDP does not put all masters back after a pass without gradients.
    return seen + [local(weight) for weight in optimizer.param_groups[0]["params"]]


CASES = {
    "microbatches": Case(microbatches=3),
    "full": Case(ac="full"),
    "selective": Case(ac="selective"),
    "tied": Case(tied=True, microbatches=2),
    "compiled": Case(compiled=True, microbatches=2, ac="full"),
    "tensorwise": Case(float8=TENSORWISE, microbatches=2),
    "rowwise": Case(float8=ROWWISE, microbatches=2, ac="full"),
    "rowwise_with_gw_hp": Case(float8={"recipe_name": "rowwise_with_gw_hp"}, microbatches=3),
    "TP, tensorwise": Case(tp=2, float8=TENSORWISE, microbatches=2),
    "TP, rowwise": Case(tp=2, float8=ROWWISE, microbatches=2),
    "mxfp8": Case(float8=MXFP8, microbatches=2, ac="full"),
    "gathered": Case(float8=GATHERED, microbatches=2, ac="full"),
    "gathered, tied": Case(float8=GATHERED, tied=True),
    "precomputed": Case(float8=GATHERED | {"precompute_float8_dynamic_scale_for_fsdp": True}),
    "TP": Case(tp=2, microbatches=2),
    "TP, tied": Case(tp=2, tied=True, ac="selective"),
    "TP, gathered": Case(tp=2, float8=GATHERED, microbatches=2, ac="full"),
    "rowwise, compiled": Case(float8=ROWWISE, ac="selective", compiled=True),
    "cast once, compiled": Case(float8=ROWWISE, microbatches=2, compiled=True),
    "mxfp8, compiled": Case(float8=MXFP8, microbatches=2, compiled=True),
    "TP, cast once, compiled": Case(tp=2, float8=ROWWISE, microbatches=2, compiled=True),
    "gathered, compiled": Case(float8=GATHERED, microbatches=2, compiled=True),
    "TP, compiled": Case(tp=2, float8=TENSORWISE, compiled=True),
}
SLOW = [name for name in CASES if name.endswith(", compiled")]
FLOATS = ("float32", "bfloat16")


def check_as_fsdp(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without an optimizing backend, which takes minutes, the graphs are the same.
    graphs = []
    for without_fsdp in (True, False):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        monkeypatch.setattr(parallel, "needs_no_fsdp", lambda *_, answer=without_fsdp, **__: answer)
        model = case.build()
        assert isinstance(model, FSDPModule) is not without_fsdp
        with torch.compiler.set_stance("default", force_backend=counter):
            values = train(case, model)
        graphs.append((counter.frame_count, values))
    (compiled, values), (_, expected) = graphs
    # With and without gradients, and the casts of a block.
    casts = bool(case.float8) and not (case.float8 == ROWWISE and case.microbatches == 1)
    assert compiled == (2 + casts if case.compiled else 0)
    for value, right in zip(values, expected, strict=True):
        # Collectives of fake ranks leave NaN before torch 2.13.
        torch.testing.assert_close(
            value, right, rtol=0, atol=0, equal_nan=version("torch") < "2.13"
        )


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in CASES],
)
def test_it_trains_as_with_fsdp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_as_fsdp(CASES[name], monkeypatch)


@pytest.mark.parametrize("types", [*product(FLOATS, repeat=3)], ids="-".join)
def test_it_sums_gradients_in_the_types_of_fsdp(types, monkeypatch):
    keys = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
    check_as_fsdp(Case(microbatches=3, training=dict(zip(keys, types, strict=True))), monkeypatch)


class Written(TorchDispatchMode):
    """Elements of the matrices that operators cast, and of what they copy together, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: dict[str, list[int]] = {"_foreach_copy_": [], "clamp": [], "_to_copy": []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "_foreach_copy_":
            self.elements[name].append(sum(each.numel() for each in args[0]))
        elif name in self.elements and args[0].ndim == 2:
            self.elements[name].append(args[0].numel())
        return func(*args, **(kwargs or {}))


def trained(case: Case) -> Transformer:
    """A model after one step."""
    model = case.build()
    train(case, model, steps=1)
    return model


def test_a_step_copies_each_weight_once_and_casts_each_gradient_once() -> None:
    model = trained(Case(microbatches=3))
    elements = sum(weight.numel() for weight in model.parameters())
    in_norms = 5 * ARGS.dim
    for i in range(3):
        start_microbatch(model, ParallelismConfig(), last=i == 2)
        with Written() as forward:
            total = loss(model, TOKENS[i])
        with Written() as backward:
            total.backward()
        assert forward.elements["_foreach_copy_"] == ([elements] if i == 0 else [])
        # Later gradients are added to the first ones.
        assert sum(backward.elements["_to_copy"]) == (elements - in_norms if i == 0 else 0)


@pytest.mark.parametrize("without_fsdp", [True, False], ids=["alone", "FSDP"])
@pytest.mark.parametrize(
    ("float8", "casts", "nbytes"),
    [
        (TENSORWISE, 1, 1),
        (ROWWISE, 2, 2),
        ({"recipe_name": "rowwise_with_gw_hp"}, 2, 2),
        (GATHERED, 1, 1),
    ],
    ids=lambda value: value["recipe_name"] if isinstance(value, dict) else None,
)
def test_weights_that_stay_are_cast_once_a_step(
    float8, casts, nbytes, without_fsdp: bool, monkeypatch
) -> None:
    monkeypatch.setattr(parallel, "needs_no_fsdp", lambda *_, **__: without_fsdp)
    case = Case(float8=float8, microbatches=3, ac="full", reshard="never")
    model = case.build()
    linears = [module for module in model.layers.modules() if isinstance(module, nn.Linear)]
    seen: list[GemmInputRole] = []
    for i in range(3):
        start_microbatch(model, case.parallelism, last=i == 2)
        with observe_float8_casts(lambda _, cast: seen.append(cast._gemm_input_role)):
            total = loss(model, TOKENS[i])
            held = [linear.weight for linear in linears]
            total.backward()
        assert seen.count(GemmInputRole.WEIGHT) == casts * len(linears)
        # Held as long as the weights of the step, in place of what was gathered.
        data = [part for weight in held for part in data_of(weight)]
        elements = sum(weight.numel() for weight in held)
        freed = 0 if i == 2 else nbytes * elements
        assert sum(part.untyped_storage().size() for part in data) == freed
        if not without_fsdp and float8 != GATHERED:
            assert all(g.untyped_storage().size() == 0 for g in gathered_of(model.layers["0"]))
    assert all(weight.grad is not None for weight in model.parameters())


def gathered_of(block: nn.Module) -> list[Tensor]:
    """What FSDP has gathered of the linears of a block."""
    params = block._get_fsdp_state()._fsdp_param_group.fsdp_params
    linears = [each for each in params if isinstance(each._module_info.module, nn.Linear)]
    return [gathered for each in linears for gathered in each.all_gather_outputs]


CAST = ["tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "TP, tensorwise", "TP, rowwise"]


@pytest.mark.parametrize("name", CAST)
def test_fsdp_that_keeps_weights_trains_as_fsdp_that_gathers_them_again(name, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "needs_no_fsdp", lambda *_, **__: False)
    found = [
        train(case, case.build())
        for case in (replace(CASES[name], reshard=each) for each in ("never", "default"))
    ]
    for value, right in zip(*found, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=0)


def bytes_of_copies(model: Transformer) -> int:
    return sum(s.size() for weight in model.copies._weights for s in weight.storages)


@pytest.mark.parametrize("tied", [False, True])
def test_copies_live_from_the_first_forward_of_a_step_to_its_last_backward(tied: bool) -> None:
    model = Case(tied=tied).build()
    masters = list(model.parameters())
    elements = sum(weight.numel() for weight in masters)
    for last in (False, True):
        start_microbatch(model, ParallelismConfig(), last=last)
        total = loss(model, TOKENS[0])
        assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
        # The last one frees the embedding before its backward pass, unless the output needs it.
        freed = 128 * 64 if last and not tied else 0
        assert bytes_of_copies(model) == 2 * (elements - freed)
        total.backward()
        assert all(map(lambda a, b: (a is b) is last, model.parameters(), masters))
        assert all((weight.grad is not None) is last for weight in masters)
    assert bytes_of_copies(model) == 0
    assert (model.output.weight is model.tok_embeddings.weight) is tied


@pytest.mark.parametrize("float8", [{}, TENSORWISE], ids=["bf16", "float8"])
def test_backward_passes_of_a_pipeline_follow_each_other_and_compute_again(float8):
    gradients = []
    for forwards in ((0,), (1,)), ((0, 1), ()):  # one after another, or both at once
        model = Case(ac="full", float8=float8).build()
        losses = []
        for i, begun in enumerate(forwards):
            losses += [loss(model, TOKENS[each]) for each in begun]
            model.copies.last_microbatch = i == 1
            losses.pop(0).backward()
        gradients.append([local(weight.grad) for weight in model.parameters()])
    for one, both in zip(*gradients, strict=True):
        torch.testing.assert_close(both, one, rtol=0, atol=0)


def raise_error(x: Tensor, weight: Tensor) -> Tensor:
    raise ArithmeticError


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("float8", [{}, GATHERED], ids=["bf16", "gathered"])
def test_a_validation_or_an_error_leaves_nothing_in_the_model(fails, float8):
    model = Case(float8=float8).build()
    masters = list(model.parameters())
    if fails:
        pytest.raises(ArithmeticError, model, TOKENS[0], raise_error)
    else:
        torch.no_grad()(loss)(model, TOKENS[0])
    assert all(map(lambda a, b: a is b, model.parameters(), masters))
    assert bytes_of_copies(model) == 0


def test_masters_are_plain_tensors() -> None:
    model = Case(float8=GATHERED).build()
    assert all(type(weight) is nn.Parameter for weight in model.parameters())
    loss(model, TOKENS[0]).backward()
    loss(model, TOKENS[1])  # gradients have the compute type, and so what replaces the masters
    cast = [weight for weight in model.parameters() if is_float8_tensor(weight)]
    assert [weight.dtype for weight in cast] == 7 * ARGS.n_layers * [torch.bfloat16]


def test_ranks_that_split_the_model_only_need_no_fsdp_unless_weights_are_in_cpu_memory() -> None:
    model = Case(tp=2).build()
    assert not isinstance(model, FSDPModule)
    assert all(isinstance(weight, DTensor) for weight in model.parameters())
    assert isinstance(Case(training={"enable_cpu_offload": True}).build(), FSDPModule)
