"""Which linears train in float8, and why: decided from names and per-rank shapes before anything is
converted.

A linear multiplies three times, each with this rank's M tokens, K in_features and N out_features:
output [M, N] over K, grad_input [M, K] over N, grad_weight [N, K] over M.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.tables import format_columns

MULTIPLE = 16
"""cuBLAS and CUTLASS float8 matmuls take rows of 16-byte multiples only (torch._scaled_mm)."""
MX_MULTIPLE = 32
"""MXFP8 has a scale for each block of 32 along the dimension that a matmul sums over (OCP MX
specification 1.0)."""
OUTPUT = "output"
"""The projection to the vocabulary, which is converted only where that is asked for."""
AUTO = "auto"
"""In filter_fqns: what float8 would not make faster."""


def size_multiple(recipe_name: str) -> int:
    """What every size of a recipe's matmuls must be a multiple of on each rank."""
    return MX_MULTIPLE if recipe_name == "mxfp8" else MULTIPLE


@dataclass(frozen=True)
class LinearChoice:
    """A linear of the model: shapes are (out_features, in_features); `kept_because` is "" for one
    that is converted."""

    name: str
    shape: tuple[int, int]
    local_shape: tuple[int, int]
    kept_because: str

    @property
    def converted(self) -> bool:
        """Whether the linear trains in float8."""
        return not self.kept_because

    @property
    def kind(self) -> str:
        """The name without the layer's number: all linears of a kind have the same shapes."""
        return ".".join(
            part for part in self.name.split(".") if part != "layers" and not part.isdigit()
        )


def matches(pattern: str, name: str) -> bool:
    """True if the dotted parts of `pattern`, in which * stands for any text, are consecutive parts
    of `name`."""
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


def select_linears(
    model: nn.Module,
    *,
    filter_fqns: Collection[str],
    sharded_dims: Mapping[str, int],
    tp_degree: int,
    tokens: int | None,
    convert_output: bool = False,
    multiple: int = MULTIPLE,
    slower: Callable[[Sequence[LinearChoice]], Mapping[str, str]] | None = None,
) -> list[LinearChoice]:
    """The choice for every nn.Linear of `model`, which has its global shapes, in the model's order.

    `sharded_dims` names the dimension (0: out, 1: in) that tensor parallelism splits, by the last
    part of a linear's name. `tokens` is M, None where the weight gradient is in high precision or
    padded. Raises ConfigError for a filter that matches nothing, or what `convert_output` asks for,
    and for every converted kind of linear of which a dimension is not a `multiple` on each rank.

    With "auto" among the filters, such linears are kept instead, and so are the kinds that
    `slower`, given the choices that are left, returns with a reason."""
    linears = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    filters = [pattern for pattern in filter_fqns if pattern != AUTO]
    errors = [
        f"[float8] filter_fqns holds {pattern!r}, which matches no linear; use parts of the names "
        f"{', '.join(sorted(_kinds(linears)))}, or layers.0 and the like."
        for pattern in filters
        if not any(matches(pattern, name) for name in linears)
    ]
    choices = []
    for name, linear in linears.items():
        shape = (linear.out_features, linear.in_features)
        split = sharded_dims.get(name.rsplit(".", 1)[-1])
        local = tuple(
            math.ceil(n / tp_degree) if dim == split else n for dim, n in enumerate(shape)
        )
        kept_by = next(
            (f"filter_fqns {pattern!r}" for pattern in filters if matches(pattern, name)), ""
        )
        if name == OUTPUT and convert_output and kept_by:
            errors.append(
                f"[float8] convert_output = true, and {kept_by} keeps it in high precision; take that out, or set "
                "convert_output = false."
            )
        elif name == OUTPUT and not convert_output:
            kept_by = "the projection to the vocabulary stays in high precision"
        choices.append(LinearChoice(name, shape, (local[0], local[1]), kept_by))
    grain = _Grain(multiple, tp_degree, tokens)
    if AUTO in filter_fqns:
        assert slower is not None, "auto needs to be told what float8 makes slower"
        choices = [_keep(choice, grain.obstacle(choice)) for choice in choices]
        reasons = slower([choice for choice in choices if choice.converted])
        choices = [_keep(choice, reasons.get(choice.kind, "")) for choice in choices]
    else:
        errors += grain.errors(choices)
        if not any(choice.converted for choice in choices):
            errors.append(
                f"[float8] filter_fqns = {filters} keeps all {len(choices)} linears in high precision; "
                "take a name out, or set [float8] enable_float8_linear = false."
            )
    if errors:
        raise ConfigError("\n".join(errors))
    return choices


def _kinds(names: Iterable[str]) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name in names}


def _keep(choice: LinearChoice, reason: str) -> LinearChoice:
    return replace(choice, kept_because=choice.kept_because or reason)


@dataclass(frozen=True)
class _Grain:
    """What float8 matmuls ask of the sizes on each rank: to be a multiple, `tokens` too where it is
    not None."""

    multiple: int
    tp_degree: int
    tokens: int | None

    def obstacle(self, choice: LinearChoice) -> str:
        """Why float8 matmuls would refuse `choice`; "" if they would not."""
        if self.tokens is not None and self.tokens % self.multiple:
            return (
                f"local_batch_size * seq_len = {self.tokens} is not a multiple of {self.multiple}"
            )
        wrong = " and ".join(text for text, _ in self._wrong_dimensions(choice))
        return f"{wrong}, not a multiple of {self.multiple}" if wrong else ""

    def errors(self, choices: Sequence[LinearChoice]) -> list[str]:
        """One message for each kind of converted linear that float8 matmuls would refuse, and one
        for the tokens."""
        errors = {}
        for choice in choices:
            wrong = self._wrong_dimensions(choice)
            if choice.converted and wrong:
                keep = (
                    "set [float8] convert_output = false"
                    if choice.name == OUTPUT
                    else f'add "{choice.kind.rsplit(".", 1)[-1]}" to [float8] filter_fqns'
                )
                errors[choice.kind] = (
                    f"[float8] {choice.kind}: {' and '.join(text for text, _ in wrong)} on each rank, not a multiple "
                    f"of {self.multiple}, which float8 matmuls need; the nearest that divide so: "
                    f"{', '.join(near for _, near in wrong)}. "
                    f"Lower [parallelism] tensor_parallel_degree, or {keep}."
                )
        if (
            self.tokens is not None
            and self.tokens % self.multiple
            and any(choice.converted for choice in choices)
        ):
            # torchao pads for the matmuls that it scales a tensor or a row at a time.
            padded = (
                ", or set [float8] pad_inner_dim = true, which is slower"
                if self.multiple == MULTIPLE
                else ""
            )
            errors["tokens"] = (
                f"[float8] the weight gradient sums over local_batch_size * seq_len = {self.tokens} tokens, not a "
                f"multiple of {self.multiple}, which float8 matmuls need; change [training] local_batch_size or "
                f"seq_len so that the product is {_multiples_near(self.tokens, self.multiple)}{padded}."
            )
        return list(errors.values())

    def _wrong_dimensions(self, choice: LinearChoice) -> list[tuple[str, str]]:
        """The dimensions of `choice` that are not a multiple on each rank, and the sizes near that
        would be."""
        wrong = []
        labels = ("out_features", "in_features")
        for label, size, local in zip(labels, choice.shape, choice.local_shape, strict=True):
            ranks = 1 if local == size else self.tp_degree
            if size % (self.multiple * ranks):
                split = f" ({size} over tensor_parallel_degree {ranks})" if ranks > 1 else ""
                wrong.append(
                    (
                        f"{label} {local}{split}",
                        f"{label} {_multiples_near(size, self.multiple * ranks)}",
                    )
                )
        return wrong


def _multiples_near(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def format_choices(choices: Sequence[LinearChoice]) -> str:
    """A table with a row for each kind of linear and reason: count, global and per-rank shape,
    precision and why."""
    rows: dict[tuple[str, ...], int] = {}
    for choice in choices:
        shape, local = (f"{out} x {in_}" for out, in_ in (choice.shape, choice.local_shape))
        row = (
            choice.kind,
            shape,
            local,
            "float8" if choice.converted else "high precision",
            choice.kept_because,
        )
        rows[row] = rows.get(row, 0) + 1
    header = ("linear", "count", "out x in", "per rank", "trained in", "why")
    return format_columns(
        [header, *((row[0], str(count), *row[1:]) for row, count in rows.items())]
    )
