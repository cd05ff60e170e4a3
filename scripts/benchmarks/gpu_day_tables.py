"""Markdown tables of a results file of gpu_day.py, for docs/performance.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kernel_times import MATMULS

from torchtitan_lite.base.tables import format_columns
from torchtitan_lite.catalog.devices import lookup_device
from torchtitan_lite.planner.constants import rates_of

NAME_WIDTH = 72  # of a kernel's name
Results = Mapping[str, Any]


def format_results(results: Results) -> str:
    """Format all that is in the results, in the order of importance."""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    head = (
        f"{results['device']} ({results['gpus']} in the node, one used), {results['date']}, "
        f"commit {results['commit']}, {versions}; ended: {results['ended_by']}, after "
        f"{results['seconds']:.0f} s"
    )
    formats = {
        "kernels": _kernels,
        "tests": _tests,
        "rows": _rows,
        "profile": _profile,
    }
    parts = [head]
    for name, part in results["parts"].items():
        parts.append(f"{name}: {part['status']}, {part['seconds']:.0f} s")
        parts += [part["unread"]] if "unread" in part else formats[name](part)
        if name == "kernels":
            parts += _rates(results)
    return "\n\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    return format_columns([header, *rows], right=range(left, len(header)), markdown=True)


def _kernels(part: Results) -> list[str]:
    """TFLOP/s of matmuls by shape and kind, microseconds of the other kernels, and what failed."""
    measured = [each for each in part["measurements"] if "seconds" in each]
    matmuls = [each for each in measured if each["kind"] in MATMULS]
    seconds = {(each["kind"], each["what"]): each["seconds"] for each in matmuls}
    kinds = [kind for kind in MATMULS if any(each["kind"] == kind for each in matmuls)]
    rows = []
    for what, sizes in {each["what"]: each["sizes"] for each in matmuls}.items():
        flops = 2 * sizes["rows"] * sizes["columns"] * sizes["inner"]
        times = [seconds.get((kind, what)) for kind in kinds]
        cells = (f"{flops / each / 1e12:,.0f}" if each else "" for each in times)
        rows.append([what, "{rows} x {columns} x {inner}".format_map(sizes), *cells])
    texts = [_table(("TFLOP/s", "M x N x K", *kinds), rows)] if rows else []

    others = [each for each in measured if each["kind"] not in MATMULS]
    rows = [[each["what"], each["kind"], f"{1e6 * each['seconds']:,.1f}"] for each in others]
    texts += [_table(("kernel", "constant", "microseconds"), rows, left=2)] if rows else []
    failed = [each for each in part["measurements"] if "error" in each]
    return texts + [f"{each['kind']}, {each['what']}: {each['error']}" for each in failed]


def _rates(results: Results) -> list[str]:
    """The planner's constants as measured, beside the published ones."""
    device = lookup_device(results["device"])
    assert device is not None, "only known devices are measured"
    published = asdict(rates_of(device))
    rows = [
        [name, f"{value:.3g}", f"{published[name]:.3g}", f"{value / published[name]:.3f}"]
        for name, value in results["rates"].items()
    ]
    header = ("constant", "measured", "published", "ratio")
    table = format_columns([header, *rows], right=(1, 2, 3), markdown=True)
    implausible = (f"{name}: left out: {why}" for name, why in results["implausible"].items())
    return [*([table] if rows else []), *implausible]


def _tests(part: Results) -> list[str]:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in part["outcomes"].items())
    return [counts or "no test ended", *part["failed"]]


def _rows(part: Results) -> list[str]:
    return [part["table"]]


def _profile(part: Results) -> list[str]:
    rows = [
        [
            each["name"][:NAME_WIDTH],
            str(each["calls"]),
            f"{each['ms']:.2f}",
            f"{each['ms'] / part['ms']:.1%}",
        ]
        for each in part["top"]
    ]
    total = f"{part['kernels']:,} kernels in {part['ms']:.1f} ms of one step; {part['trace']}"
    return [total, *([_table(("kernel", "calls", "ms", "share"), rows)] if rows else [])]
