"""Which linears are converted, and the messages for what cannot be."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.flavors import ModelArgs
from torchtitan_lite.config import Float8Config, matches
from torchtitan_lite.float8.selection import LinearChoice, format_choices, select_linears
from torchtitan_lite.models.llama3 import Transformer

# ----- select_linears, AUTO, format_choices -----

ARGS = ModelArgs(
    dim=64, n_layers=12, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=50, max_seq_len=16
)


@pytest.fixture
def model() -> nn.Module:
    with torch.device("meta"):
        return Transformer(ARGS)


def select(
    model: nn.Module,
    *filters: str,
    tp_degree: int = 1,
    tokens: int | None = 64,
    slower: Any = None,
    **keys: Any,
) -> list[LinearChoice]:
    """`keys` are other keys of [float8]."""
    float8 = Float8Config(filter_fqns=filters, **keys)
    return select_linears(model, float8, tp_degree=tp_degree, tokens=tokens, slower=slower)


def names(choices: list[LinearChoice]) -> list[str]:
    """The linears that are converted."""
    return [name for choice in choices if choice.converted for name in choice.names]


@pytest.mark.parametrize("tokens", [64, None])  # None: the weight gradient is in high precision
@pytest.mark.parametrize("filters", [("output",), ()])
def test_all_seven_linears_of_every_block_are_converted_and_output_is_not(filters, tokens, model):
    choices = select(model, *filters, tokens=tokens)
    assert len(names(choices)) == 7 * 12
    (kept,) = [choice for choice in choices if not choice.converted]
    assert kept.kind == "output" and "high precision" in kept.kept_because


def test_filters_keep_what_they_name(model: nn.Module) -> None:
    choices = [choice for choice in select(model, "wk", "layers.1") if not choice.converted]
    kept = {name: choice.kept_because for choice in choices for name in choice.names}
    assert kept["layers.5.attention.wk"] == "filter_fqns 'wk'"
    assert kept["layers.1.attention.wq"] == "filter_fqns 'layers.1'"
    assert "layers.11.attention.wq" not in kept
    assert len(kept) == 12 + 6 + 1


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("wk", "layers.0.attention.wk", True),
        ("attention.wk", "layers.0.attention.wk", True),
        ("layers.1", "layers.11.attention.wk", False),
        ("layers.3.attention", "layers.3.attention.wk", True),
        ("attention.layers", "layers.3.attention.wk", False),
        ("a.b.c.d.e", "layers.3.attention.wk", False),
    ],
)
def test_patterns_are_matched_part_by_part(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_local_shapes_are_those_after_tensor_parallelism(model: nn.Module) -> None:
    local = {choice.kind: choice.local_shape for choice in select(model, tp_degree=2)}
    assert local["attention.wq"] == (32, 64)
    assert local["attention.wk"] == (16, 64)
    assert local["feed_forward.w2"] == (64, 48)
    assert local["output"] == (25, 64)


@pytest.mark.parametrize(
    ("filters", "options", "refused"),
    [
        ("lm_head output", {}, r"filter_fqns holds 'lm_head', which matches no linear.*output, w"),
        ("auto lm_head", {"slower": lambda left: {}}, "'lm_head', which matches no linear"),
        ("layers", {}, r"keeps all 85 linears in high precision.*enable_float8_linear = false"),
        ("", {"tokens": 40}, r"context_parallel_degree = 40 tokens.* 32 or 48"),
        ("", {"tokens": 9}, r"= 9 tokens.* is 16 or 32, or set \[float8\] pad_inner_dim = true"),
        ("", {"tokens": 48, "recipe_name": "mxfp8"}, r"= 48 tokens, .* 32.* is 32 or 64\.$"),
        (
            "output",
            {"convert_output": True},
            "convert_output = true, and filter_fqns 'output'",
        ),
    ],
)
def test_filters_and_tokens_that_are_errors(filters, options, refused, model):
    with pytest.raises(ConfigError, match=refused):
        select(model, *filters.split(), **options)


def test_dimensions_that_are_no_multiple_of_16_are_an_error_with_the_numbers(model):
    with pytest.raises(ConfigError) as caught:
        select(model, tp_degree=4)
    lines = str(caught.value).split("\n")
    assert len(lines) == 5  # wk, wv, and with 96 / 4 = 24 also w1, w2, w3
    assert re.search(
        r"^\[float8\] attention\.wk: out_features 8 \(32 over tensor_parallel_degree 4\).* 16.*; "
        r'lower.*add "wk" to \[float8\] filter_fqns',
        lines[0],
    )
    assert re.search(r"w2: in_features 24 \(96 over ", str(caught.value))
    # What is kept need not fit, as a vocabulary of 50.
    choices = select(model, "wk", "wv", "feed_forward", tp_degree=4)
    assert len(names(choices)) == 2 * 12
    assert choices[-1].local_shape == (13, 64) and not choices[-1].converted


def test_output_is_converted_where_that_is_asked_for_and_checked_like_any_other(model):
    model.output = nn.Linear(64, 96, bias=False, device="meta")
    assert names(select(model, "wk", tp_degree=2, convert_output=True))[-1] == "output"
    with pytest.raises(
        ConfigError,
        match=r"output: out_features 24 \(96 over .* 4\).*or set \[float8\] convert_output = false",
    ):
        select(model, "wv", "feed_forward", "wk", tp_degree=4, convert_output=True)


def select_auto(
    model: nn.Module, *filters: str, slower: dict[str, str], **options: Any
) -> dict[str, str]:
    """Why each kind is kept, "" for those that are converted, in layer 3."""

    def find_slower(left: list[LinearChoice]) -> dict[str, str]:
        return {choice.kind: slower[choice.kind] for choice in left if choice.kind in slower}

    choices = select(model, "auto", *filters, slower=find_slower, **options)
    in_layer = [choice for choice in choices if any("layers.3." in name for name in choice.names)]
    return {choice.kind: choice.kept_because for choice in in_layer}


def test_auto_keeps_what_float8_makes_slower_with_its_reason(model: nn.Module) -> None:
    kept = select_auto(model, "w1", slower={"attention.wk": "1.40x", "feed_forward.w1": "2x"})
    assert {kind: why for kind, why in kept.items() if why} == {
        "attention.wk": "1.40x",
        "feed_forward.w1": "filter_fqns 'w1'",
    }


def test_auto_may_convert_nothing(model: nn.Module) -> None:
    kinds = select_auto(model, slower={})
    assert len(kinds) == 7 and not any(kinds.values())
    assert all(select_auto(model, slower=dict.fromkeys(kinds, "slower")).values())


def test_auto_keeps_what_has_no_float8_shape(model: nn.Module) -> None:
    kept = select_auto(model, slower={}, tp_degree=4)
    assert re.match(r"out_features 8 \(32 over .* 4\), not a multiple of 16$", kept["attention.wk"])
    assert kept["attention.wq"] == ""
    (odd,) = set(select_auto(model, slower={}, tokens=33).values())
    assert re.match(r"local_batch_size \* .* = 33, not a multiple of 16$", odd)


def test_the_table_has_a_row_for_each_kind_with_count_shapes_and_reason(model: nn.Module) -> None:
    table = format_choices(select(model, "layers.0", "output", tp_degree=2)).split("\n")
    rows = [re.split(r"  +", line) for line in table]
    assert rows[0] == ["linear", "count", "out x in", "per rank", "trained in", "why"]
    wk, reason = ["32 x 64", "16 x 64"], "filter_fqns 'layers.0'"
    assert ["attention.wk", "11", *wk, "float8"] in rows
    assert ["attention.wk", "1", *wk, "high precision", reason] in rows
    assert rows[-1][0] == "output"
