"""Which linears train in float8, and why: decided from names and per-rank shapes before anything is converted.

A linear multiplies three times, each with this rank's M tokens, K in_features and N out_features:
output [M, N] over K, grad_input [M, K] over N, grad_weight [N, K] over M.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from torchtitan_lite.errors import ConfigError

MULTIPLE = 16
"""cuBLAS and CUTLASS float8 matmuls take rows of 16-byte multiples only (torch._scaled_mm)."""
AUTO = "auto"
"""In filter_fqns: what float8 would not make faster."""


@dataclass(frozen=True)
class LinearChoice:
    """A linear of the model: shapes are (out_features, in_features); `kept_because` is "" for one that is converted."""

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
        return ".".join(part for part in self.name.split(".") if part != "layers" and not part.isdigit())


def matches(pattern: str, name: str) -> bool:
    """True if the dotted parts of `pattern`, in which * stands for any text, are consecutive parts of `name`."""
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
    slower: Callable[[Sequence[LinearChoice]], Mapping[str, str]] | None = None,
) -> list[LinearChoice]:
    """The choice for every nn.Linear of `model`, which has its global shapes, in the model's order.

    `sharded_dims` names the dimension (0: out, 1: in) that tensor parallelism splits, by the last part of a linear's
    name. `tokens` is M, None where the weight gradient is in high precision. Raises ConfigError for a filter that
    matches nothing, and for every converted kind of linear of which a dimension is not a multiple of 16.

    With "auto" among the filters, such linears are kept instead, and so are the kinds that `slower`, given the choices
    that are left, returns with a reason."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
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
        local = tuple(n // tp_degree if dim == split else n for dim, n in enumerate(shape))
        kept_by = next((f"filter_fqns {pattern!r}" for pattern in filters if matches(pattern, name)), "")
        if name == "output":
            kept_by = "the projection to the vocabulary stays in high precision"
        choices.append(LinearChoice(name, shape, (local[0], local[1]), kept_by))
    if AUTO in filter_fqns:
        assert slower is not None, "auto needs to be told what float8 makes slower"
        choices = [_keep(choice, _obstacle(choice, tp_degree=tp_degree, tokens=tokens)) for choice in choices]
        reasons = slower([choice for choice in choices if choice.converted])
        choices = [_keep(choice, reasons.get(choice.kind, "")) for choice in choices]
    else:
        errors += _indivisible(choices, tp_degree=tp_degree, tokens=tokens)
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


def _wrong_shape(choice: LinearChoice, *, tp_degree: int) -> str:
    """The per-rank dimensions of `choice` that are not a multiple of 16, in words; "" if there is none."""
    return " and ".join(
        f"{label} {local}" + (f" ({size} over tensor_parallel_degree {tp_degree})" if local != size else "")
        for label, size, local in zip(("out_features", "in_features"), choice.shape, choice.local_shape, strict=True)
        if local % MULTIPLE
    )


def _obstacle(choice: LinearChoice, *, tp_degree: int, tokens: int | None) -> str:
    """Why the hardware's float8 matmuls would refuse `choice`; "" if they would not."""
    if tokens is not None and tokens % MULTIPLE:
        return f"local_batch_size * seq_len = {tokens} is not a multiple of {MULTIPLE}"
    wrong = _wrong_shape(choice, tp_degree=tp_degree)
    return f"{wrong}, not a multiple of {MULTIPLE}" if wrong else ""


def _indivisible(choices: list[LinearChoice], *, tp_degree: int, tokens: int | None) -> list[str]:
    """One message for each kind of converted linear that the hardware's float8 matmuls would refuse."""
    errors = {}
    for choice in choices:
        wrong = _wrong_shape(choice, tp_degree=tp_degree)
        if choice.converted and wrong:
            errors[choice.kind] = (
                f"[float8] {choice.kind}: {wrong} on each rank, not a multiple of {MULTIPLE}, which "
                f"float8 matmuls need; lower [parallelism] tensor_parallel_degree, or add "
                f'"{choice.kind.rsplit(".", 1)[-1]}" to [float8] filter_fqns.'
            )
    if tokens is not None and tokens % MULTIPLE and any(choice.converted for choice in choices):
        errors["tokens"] = (
            f"[float8] the weight gradient sums over local_batch_size * seq_len = {tokens} tokens, not a multiple of "
            f"{MULTIPLE}, which float8 matmuls need; change [training] local_batch_size or seq_len so that the product "
            f"is {tokens // MULTIPLE * MULTIPLE or MULTIPLE} or {(tokens // MULTIPLE + 1) * MULTIPLE}."
        )
    return list(errors.values())


def format_choices(choices: list[LinearChoice]) -> str:
    """A table with a row for each kind of linear and reason: count, global and per-rank shape, precision and why."""
    rows: dict[tuple[str, ...], int] = {}
    for choice in choices:
        shape, local = (f"{out} x {in_}" for out, in_ in (choice.shape, choice.local_shape))
        row = (choice.kind, shape, local, "float8" if choice.converted else "high precision", choice.kept_because)
        rows[row] = rows.get(row, 0) + 1
    header = ("linear", "count", "out x in", "per rank", "trained in", "why")
    table = [header] + [(row[0], str(count), *row[1:]) for row, count in rows.items()]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
