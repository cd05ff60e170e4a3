"""Stages of a model on one process: cut, chained by hand, and joined again; and with what the
backward passes in two parts of zero-bubble schedules are right."""

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from sample_models import SMALL, on_meta, ready
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.float8.observe import StepObserver
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel import pipeline
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.microbatches import ModelLoss
from torchtitan_lite.parallel.parallelize import compile_blocks
from torchtitan_lite.parallel.pipeline import PipelinedMicrobatches, cut_stage, join_stages

# ----- cut_stage, join_stages -----

NAMES = (("tok_embeddings", "layers.0"), ("layers.1",), ("layers.2", "layers.3", "norm", "output"))
TOKENS = torch.arange(32).view(2, 16)


def whole() -> Transformer:
    return on_meta(replace(SMALL, n_layers=4))


def loss(model: Transformer, hidden: Tensor | None = None) -> Tensor:
    of_model = ModelLoss(model, CrossEntropy(compiled=False), gathers_logits=False)
    return of_model(TOKENS, TOKENS, hidden, scale=1 / 32)


def test_a_stage_has_its_modules_under_their_names_in_the_model() -> None:
    model = whole()
    stages = [cut_stage(model, names) for names in NAMES]
    found = [set(dict(stage.named_parameters())) for stage in stages]
    for names, parameters in zip(NAMES, found, strict=True):
        assert all(any(each.startswith(f"{name}.") for each in parameters) for name in names)
    assert sum(map(len, found)) == len(dict(model.named_parameters()))
    assert set().union(*found) == set(dict(model.named_parameters()))
    assert all(weight.is_meta for stage in stages for weight in stage.parameters())
    assert list(model.layers) == ["0", "1", "2", "3"]  # the model stays whole


def test_stages_one_after_another_are_the_model_to_the_bit() -> None:
    model, stages = ready(whole()), [ready(cut_stage(whole(), names)) for names in NAMES]
    expected = loss(model)
    expected.backward()
    hidden = None
    for stage in stages:
        hidden = loss(stage, hidden)
    assert hidden is not None and torch.equal(hidden, expected)
    hidden.backward()

    weights = dict(model.named_parameters())
    for stage in stages:
        for name, weight in stage.named_parameters():
            assert torch.equal(weight, weights[name]), name
            assert torch.equal(weight.grad, weights[name].grad), name


def test_joined_stages_share_the_parameters_of_the_model() -> None:
    stages = [cut_stage(whole(), names) for names in NAMES]
    joined = dict(join_stages(stages).named_parameters())
    assert joined.keys() == dict(whole().named_parameters()).keys()
    assert all(joined[name] is w for stage in stages for name, w in stage.named_parameters())
    assert join_stages(stages[:1]) is stages[0]


def test_every_second_block_is_counted_over_the_whole_model() -> None:
    recomputed = []
    for names in NAMES:
        stage = cut_stage(whole(), names)
        plain: dict[str, nn.Module] = dict(stage.layers.items())
        settings = ActivationCheckpointConfig(mode="selective", selective_ac_option="2")
        apply_activation_checkpointing(stage, settings)
        recomputed += [i for i, block in stage.layers.items() if block is not plain[i]]
    assert recomputed == ["0", "2"]


# ----- zero_bubble: these tests fail once torch has fixed what config/stages.py refuses -----

HIDDEN = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))


def last_stage(*, float8: bool = False, full: bool = False, compiled: bool = False) -> Transformer:
    model = on_meta(SMALL, "tensorwise" if float8 else None)
    stage = cut_stage(model, ("layers.1", "norm", "output"))
    mode = "full" if full else "none"
    apply_activation_checkpointing(stage, ActivationCheckpointConfig(mode=mode))
    if compiled:
        compile_blocks(stage)
    return ready(stage)


def gradients(stage: Transformer, *, in_two_parts: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The gradients of the hidden state and, by name, of the weights."""
    loss = ModelLoss(stage, CrossEntropy(compiled=False, repeatable=True), gathers_logits=False)
    hidden = HIDDEN.clone().requires_grad_()
    out = loss(TOKENS, TOKENS, hidden, scale=1 / 32)
    if in_two_parts:
        _, groups = stage_backward_input([out], None, [hidden], stage.parameters())
        stage_backward_weight(stage.parameters(), groups)
    else:
        out.backward()
    assert hidden.grad is not None
    return hidden.grad, {name: weight.grad for name, weight in stage.named_parameters()}


def differs(make: Callable[[], Transformer]) -> bool:
    """Whether the backward pass in two parts fails, or has other gradients than in one."""
    expected_hidden, expected = gradients(make(), in_two_parts=False)
    try:
        hidden, found = gradients(make(), in_two_parts=True)
    except RuntimeError:
        return True
    pairs = [(hidden, expected_hidden), *((found[name], expected[name]) for name in expected)]
    close = {"rtol": 1e-4, "atol": 1e-7}
    return not all(one is not None and torch.allclose(one, two, **close) for one, two in pairs)


def matmuls(*, in_two_parts: bool, **stage: bool) -> int:
    """The matmuls of the forward and backward pass."""
    with StepObserver() as observer:
        gradients(last_stage(**stage), in_two_parts=in_two_parts)
    return observer.matmuls.total()


OLD_TORCH = pytest.mark.skipif(
    version("torch") < "2.13", reason="zero-bubble schedules need torch 2.13"
)


@OLD_TORCH
def test_eager_stages_have_the_same_gradients_in_two_parts_for_the_same_matmuls() -> None:
    assert not differs(last_stage)
    assert matmuls(in_two_parts=True) == matmuls(in_two_parts=False)


def test_compiled_stages_are_still_refused_for_a_reason() -> None:
    """pytorch/pytorch#161904"""
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        assert differs(lambda: last_stage(compiled=True))


@OLD_TORCH
@pytest.mark.parametrize("stage", [{"float8": True}, {"full": True}])
def test_float8_and_checkpointing_still_repeat_matmuls(stage: dict[str, bool]) -> None:
    """pytorch/pytorch#164756"""
    assert matmuls(in_two_parts=True, **stage) > matmuls(in_two_parts=False, **stage)


# ----- PipelinedMicrobatches -----


def test_a_zero_bubble_schedule_is_refused_where_torch_cannot_run_it(monkeypatch) -> None:
    monkeypatch.setattr(pipeline, "version", lambda _: "2.12.1")
    given: Any = dict.fromkeys(("losses", "indices", "hidden", "group", "device", "timed"))
    with pytest.raises(ConfigError, match='"ZBVZeroBubble" .* torch 2.12.1; install torch 2.13'):
        PipelinedMicrobatches(schedule="ZBVZeroBubble", n_stages=4, n_microbatches=4, **given)
