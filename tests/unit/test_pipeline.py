"""Stages of a model on one process: cut, chained by hand, and joined again."""

from dataclasses import replace

import torch
from sample_models import SMALL, on_meta, ready
from torch import Tensor, nn

from torchtitan_lite.config import ActivationCheckpointConfig
from torchtitan_lite.models.llama3 import Transformer
from torchtitan_lite.models.loss import CrossEntropy
from torchtitan_lite.parallel.activation_checkpoint import apply_activation_checkpointing
from torchtitan_lite.parallel.microbatches import ModelLoss
from torchtitan_lite.training.model import cut_stage, join_stages

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
