"""Which linears train in float8, and why, decided from names and per-rank shapes before anything is
converted. catalog/recipes.py explains the three matmuls of a linear and their sizes M, K and N.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.catalog.flavors import BLOCK_LINEARS, OUTPUT, ROW_SPLIT
from torchtitan_lite.catalog.recipes import Recipe
from torchtitan_lite.config import AUTO, Float8Config, matches, multiples_near, unmatched_filters

TOKENS = "local_batch_size * seq_len / context_parallel_degree"


@dataclass(frozen=True)
class LinearChoice:
    """All linears of one kind, such as every layer's wq, that share a decision."""

    kind: str  # name without the layer's number: "attention.wq"
    names: tuple[str, ...]  # of the modules: "layers.0.attention.wq" and so on
    shape: tuple[int, int]  # out_features, in_features
    local_shape: tuple[int, int]  # on each rank under tensor parallelism
    kept_because: str = ""  # why they stay in high precision; "" if they train in float8

    @property
    def converted(self) -> bool:
        """Whether the linears train in float8."""
        return not self.kept_because

    @property
    def reads(self) -> str:
        """The tensor they read. Linears that read the same one share its casts."""
        return BLOCK_LINEARS[self.kind].reads if self.kind in BLOCK_LINEARS else self.kind

    def keep(self, reason: str) -> "LinearChoice":
        """Return the choice to keep the linears for `reason`, unless it is "" or another holds."""
        return replace(self, kept_because=self.kept_because or reason)


def select_linears(
    model: nn.Module,
    float8: Float8Config,
    *,
    tp_degree: int,
    tokens: int | None,
    slower: Callable[[Sequence[LinearChoice]], Mapping[str, str]] | None = None,
) -> list[LinearChoice]:
    """Decide for every nn.Linear of `model`, not yet sharded, whether it trains in float8.

    `tokens` is M; None if it is not known. With "auto" among the filters, linears that float8
    cannot multiply are kept in high precision, and the kinds for which `slower` returns a reason.

    Raises ConfigError for a filter that matches nothing, or that contradicts convert_output, and
    for sizes that are no multiple of the recipe's."""
    if float8.pad_inner_dim or not float8.recipe.divides_tokens:
        tokens = None  # any number fits
    patterns = [pattern for pattern in float8.filter_fqns if pattern != AUTO]
    choices, errors = _apply_filters(model, patterns, tp_degree, float8.convert_output)

    # Keep what float8 matmuls cannot multiply, then what they would slow down; or refuse the first.
    if AUTO in float8.filter_fqns:
        assert slower is not None, "auto needs a function that finds what float8 slows down"
        multiple = float8.recipe.size_multiple
        odd_tokens = f"{TOKENS} = {tokens}" if tokens is not None and tokens % multiple else ""
        for index, choice in enumerate(choices):
            misfit = odd_tokens or _misfits(choice, multiple, tp_degree)
            choices[index] = choice.keep(misfit and f"{misfit}, not a multiple of {multiple}")
        reasons = slower([choice for choice in choices if choice.converted])
        choices = [choice.keep(reasons.get(choice.kind, "")) for choice in choices]
    else:
        errors += _size_errors(choices, float8.recipe, tokens, tp_degree)
        if not any(choice.converted for choice in choices):
            count = sum(len(choice.names) for choice in choices)
            errors.append(
                f"[float8] filter_fqns = {patterns} keeps all {count} linears in high precision; "
                "remove a filter, or set [float8] enable_float8_linear = false."
            )
    if errors:
        raise ConfigError("\n".join(errors))
    return choices


def converted_names(choices: Iterable[LinearChoice]) -> list[str]:
    """Return the names of the linears that train in float8."""
    return [name for choice in choices if choice.converted for name in choice.names]


def _apply_filters(
    model: nn.Module, patterns: Sequence[str], tp_degree: int, convert_output: bool
) -> tuple[list[LinearChoice], list[str]]:
    """Group the linears by kind and by what keeps them, and list what is wrong with the filters."""
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    errors = unmatched_filters(patterns, linears)
    names: dict[tuple[str, str], list[str]] = {}
    for name in linears:
        kept_by = next((f"filter_fqns {p!r}" for p in patterns if matches(p, name)), "")
        if name == OUTPUT and not convert_output:
            kept_by = "the projection to the vocabulary stays in high precision"
        elif name == OUTPUT and kept_by:
            errors.append(
                f"[float8] convert_output = true, and {kept_by} keeps it in high precision; "
                "remove that filter, or set convert_output = false."
            )
        names.setdefault((re.sub(r"^layers\.\d+\.", "", name), kept_by), []).append(name)

    choices = []
    for (kind, kept_by), group in names.items():
        out, in_ = shape = (linears[group[0]].out_features, linears[group[0]].in_features)
        if kind.rpartition(".")[2] in ROW_SPLIT.values():
            local_shape = out, math.ceil(in_ / tp_degree)
        else:
            local_shape = math.ceil(out / tp_degree), in_
        choices.append(LinearChoice(kind, tuple(group), shape, local_shape, kept_by))
    return choices, errors


def _misfits(choice: LinearChoice, multiple: int, tp_degree: int, *, near: bool = False) -> str:
    """Return the sizes that are not a `multiple` on every rank, perhaps with those `near` them."""
    sizes = []
    labels = ("out_features", "in_features")
    for label, size, local in zip(labels, choice.shape, choice.local_shape, strict=True):
        ranks = 1 if local == size else tp_degree
        if size % (multiple * ranks):
            split = f" ({size} over tensor_parallel_degree {ranks})" if ranks > 1 else ""
            nearest = f", near {multiples_near(local, multiple)}" if near else ""
            sizes.append(f"{label} {local}{split}{nearest}")
    return " and ".join(sizes)


def _size_errors(
    choices: Sequence[LinearChoice], recipe: Recipe, tokens: int | None, tp_degree: int
) -> list[str]:
    """Return a message for each kind that float8 matmuls would refuse, and for the tokens."""
    multiple, errors = recipe.size_multiple, []
    lower = "lower [parallelism] tensor_parallel_degree, or " if tp_degree > 1 else ""
    converted = [choice for choice in choices if choice.converted]
    for choice in converted:
        keep = f'add "{choice.kind.rpartition(".")[2]}" to [float8] filter_fqns'
        if choice.kind == OUTPUT:
            keep = "set [float8] convert_output = false"
        if sizes := _misfits(choice, multiple, tp_degree, near=True):
            errors.append(
                f"[float8] {choice.kind}: {sizes} on each rank, not a multiple of {multiple}, "
                f"which float8 matmuls need; {lower}{keep}."
            )

    if converted and tokens is not None and tokens % multiple:
        pad = ", or set [float8] pad_inner_dim = true, which is slower"
        errors.append(
            f"[float8] the weight gradient sums over {TOKENS} = {tokens} tokens, not a multiple of "
            f"{multiple}, which float8 matmuls need; change [training] local_batch_size or seq_len "
            f"so that it is {multiples_near(tokens, multiple)}{pad if recipe.pads_tokens else ''}."
        )
    return errors


def format_choices(choices: Sequence[LinearChoice]) -> str:
    """Format a table with a row for each choice."""
    rows = [("linear", "count", "out x in", "per rank", "trained in", "why")]
    for choice in choices:
        shape, local = (f"{out} x {in_}" for out, in_ in (choice.shape, choice.local_shape))
        precision = "float8" if choice.converted else "high precision"
        count = str(len(choice.names))
        rows.append((choice.kind, count, shape, local, precision, choice.kept_because))
    return format_columns(rows)
