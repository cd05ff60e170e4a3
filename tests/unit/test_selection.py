"""Which linears are converted, and the messages for what cannot be."""

import re

import pytest
import torch
from torch import nn

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.float8.recipes import RECIPES
from torchtitan_lite.float8.selection import LinearChoice, format_choices, matches, select_linears
from torchtitan_lite.models.flavors import ModelArgs
from torchtitan_lite.models.llama3 import Transformer

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
) -> list[LinearChoice]:
    return select_linears(model, filter_fqns=filters, tp_degree=tp_degree, tokens=tokens)


def names(choices: list[LinearChoice]) -> list[str]:
    """The linears that are converted."""
    return [name for choice in choices if choice.converted for name in choice.names]


def test_all_seven_linears_of_every_block_are_converted_and_output_is_not(model: nn.Module) -> None:
    choices = select(model, "output")
    assert len(names(choices)) == 7 * 12
    assert [choice.kind for choice in choices if not choice.converted] == ["output"]


def test_output_is_kept_also_without_a_filter_for_it(model: nn.Module) -> None:
    kept = [choice for choice in select(model) if not choice.converted]
    assert [choice.kind for choice in kept] == ["output"]
    assert "high precision" in kept[0].kept_because


def test_filters_keep_what_they_name(model: nn.Module) -> None:
    kept = {
        name: choice.kept_because
        for choice in select(model, "wk", "layers.1")
        for name in choice.names
        if not choice.converted
    }
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
        ("w*", "layers.0.attention.wk", True),
        ("layers.*.attention", "layers.3.attention.wk", True),
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


def test_a_filter_that_matches_nothing_is_an_error(model: nn.Module) -> None:
    with pytest.raises(
        ConfigError,
        match=r"\[float8\] filter_fqns holds 'lm_head', which matches no linear.*output, w",
    ):
        select(model, "lm_head", "output")


def test_a_filter_that_keeps_everything_is_an_error(model: nn.Module) -> None:
    with pytest.raises(
        ConfigError, match=r"keeps all 85 linears in high precision.*enable_float8_linear = false"
    ):
        select(model, "layers")


def test_dimensions_that_are_no_multiple_of_16_are_an_error_with_the_numbers(
    model: nn.Module,
) -> None:
    with pytest.raises(ConfigError) as caught:
        select(model, tp_degree=4)
    lines = str(caught.value).split("\n")
    assert len(lines) == 5  # wk, wv, and with 96 / 4 = 24 also w1, w2, w3
    assert re.search(
        r"\[float8\] attention\.wk: out_features 8 \(32 over tensor_parallel_degree 4\) on each "
        r"rank, not a multiple "
        r'of 16.*add "wk" to \[float8\] filter_fqns',
        lines[0],
    )
    assert "the nearest sizes that fit: out_features 64 or 128. Lower" in lines[0]
    assert "feed_forward.w2: in_features 24 (96 over tensor_parallel_degree 4)" in str(caught.value)
    assert "the nearest sizes that fit: in_features 64 or 128. Lower" in str(caught.value)


def test_what_is_kept_need_not_be_a_multiple_of_16(model: nn.Module) -> None:
    choices = select(model, "wk", "wv", "feed_forward", tp_degree=4)
    assert len(names(choices)) == 2 * 12


def test_tokens_that_are_no_multiple_of_16_are_an_error_with_the_nearest_that_are(
    model: nn.Module,
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"local_batch_size \* seq_len / context_parallel_degree = 40 tokens.* 32 or 48",
    ):
        select(model, tokens=40)
    with pytest.raises(
        ConfigError, match=r"= 9 tokens.* is 16 or 32, or set \[float8\] pad_inner_dim = true"
    ):
        select(model, tokens=9)


def test_tokens_need_not_be_a_multiple_where_the_weight_gradient_is_in_high_precision(
    model: nn.Module,
) -> None:
    assert len(names(select(model, tokens=None))) == 7 * 12


def test_output_is_converted_where_that_is_asked_for_and_checked_like_any_other(
    model: nn.Module,
) -> None:
    model.output = nn.Linear(64, 96, bias=False, device="meta")
    kwargs = {"filter_fqns": ["wk"], "convert_output": True}
    choices = select_linears(model, tp_degree=2, tokens=64, **kwargs)
    assert names(choices)[-1] == "output"
    with pytest.raises(
        ConfigError,
        match=r"\[float8\] output: out_features 24 \(96 over tensor_parallel_degree 4\).*the "
        r"nearest sizes that fit: "
        r"out_features 64 or 128\. .*or set \[float8\] convert_output = false",
    ):
        select_linears(
            model, tp_degree=4, tokens=64, **kwargs | {"filter_fqns": ["wv", "feed_forward", "wk"]}
        )
    with pytest.raises(
        ConfigError, match=r"convert_output = true, and filter_fqns 'out\*' keeps it"
    ):
        select_linears(model, tp_degree=2, tokens=64, **kwargs | {"filter_fqns": ["out*"]})


@pytest.mark.parametrize(("vocab_size", "tp_degree"), [(2256, 4), (50257, 2), (50257, 1)])
def test_a_vocabulary_of_any_size_trains_with_output_in_high_precision(
    model: nn.Module, vocab_size: int, tp_degree: int
) -> None:
    model.output = nn.Linear(64, vocab_size, bias=False, device="meta")
    kept = ["wk", "wv", "feed_forward"] if tp_degree > 2 else []
    choices = select_linears(model, filter_fqns=kept, tp_degree=tp_degree, tokens=64)
    assert (
        choices[-1].local_shape == (-(-vocab_size // tp_degree), 64) and not choices[-1].converted
    )
    with pytest.raises(ConfigError, match=r"output: out_features \d+.*the nearest"):
        select_linears(
            model,
            filter_fqns=kept,
            tp_degree=tp_degree,
            tokens=64,
            convert_output=True,
        )


def test_another_multiple_is_asked_of_sizes_and_tokens(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"= 48 tokens, not a multiple of 32.* is 32 or 64\.$"):
        select_linears(model, filter_fqns=(), tp_degree=1, tokens=48, recipe=RECIPES["mxfp8"])


def test_the_table_has_a_row_for_each_kind_with_count_shapes_and_reason(model: nn.Module) -> None:
    table = format_choices(select(model, "layers.0", "output", tp_degree=2)).split("\n")
    assert table[0].split() == [
        "linear",
        "count",
        "out",
        "x",
        "in",
        "per",
        "rank",
        "trained",
        "in",
        "why",
    ]
    rows = [re.split(r"  +", line) for line in table[1:]]
    assert ["attention.wk", "11", "32 x 64", "16 x 64", "float8"] in rows
    assert [
        "attention.wk",
        "1",
        "32 x 64",
        "16 x 64",
        "high precision",
        "filter_fqns 'layers.0'",
    ] in rows
    assert rows[-1][0] == "output"


def select_auto(
    model: nn.Module,
    *filters: str,
    slower: dict[str, str],
    tp_degree: int = 1,
    tokens: int | None = 64,
) -> dict[str, str]:
    """Why each kind is kept, "" for those that are converted, in layer 3."""
    choices = select_linears(
        model,
        filter_fqns=["auto", *filters],
        tp_degree=tp_degree,
        tokens=tokens,
        slower=lambda left: {c.kind: slower[c.kind] for c in left if c.kind in slower},
    )
    return {
        choice.kind: choice.kept_because
        for choice in choices
        if any(name.startswith("layers.3.") for name in choice.names)
    }


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
    assert (
        kept["attention.wk"]
        == "out_features 8 (32 over tensor_parallel_degree 4), not a multiple of 16"
    )
    assert kept["attention.wq"] == ""
    odd = select_auto(model, slower={}, tokens=33)
    assert set(odd.values()) == {
        "local_batch_size * seq_len / context_parallel_degree = 33, not a multiple of 16"
    }


def test_a_pattern_beside_auto_must_match(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="'lm_head', which matches no linear"):
        select_auto(model, "lm_head", slower={})
