"""The MFU family as a picture: python scripts/plot_plan.py [--output docs/mfu.svg], with the plots
extra.

Of Llama 3 8B on 8 H100, at the speeds published for bf16 and for float8: the time of a token, and
within it the time that its matmuls would take at one peak or another. The figures are the
planner's; the same ones make the same file.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.config import load_config
from torchtitan_lite.errors import ConfigError, run_script
from torchtitan_lite.planner.plan import make_plan, resolve_device

ROOT = Path(__file__).parents[1]
WORLD_SIZE = 8
RUNS = {"bf16": ("llama3_8b.toml", 6297), "float8": ("llama3_8b_float8.toml", 7773)}
"""Config, and tokens per second per device."""
DENOMINATORS = {"mfu_bf16_peak": "bf16", "mfu_arithmetic_peak": "arithmetic", "mfu_fp8_peak": "fp8"}
"""The figures that hold all FLOPs against one peak."""
COLORS = {"bf16": "#2f6690", "fp8": "#c8553d", "arithmetic": "#7d6b91", "real": "#e3e6ea"}
STYLE: Any = {  # matplotlib names each key
    "font.size": 9,
    "text.color": "#22272e",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mfu",  # or ids are random
}


@dataclass(frozen=True)
class Bar:
    """A figure of the family: ideal over real time of a token on one device, in microseconds."""

    figure: str
    percent: float
    real: float
    ideal: dict[str, float]
    """By the peak that is assumed."""


def list_bars(file: str, tps: float) -> list[Bar]:
    """The family of the shipped config `file`, `mfu` first."""
    config = load_config(
        ["--job.config_file", str(ROOT / "train_configs" / file)], world_size=WORLD_SIZE
    )
    plan = make_plan(config, world_size=WORLD_SIZE, device=resolve_device("H100 SXM"), tps=tps)
    flops, peaks, percents = plan["flops_per_token"], plan["peaks"], plan["schedule"]
    ideal = {
        "mfu": {name: flops[name] / peaks[name] / 1e6 for name in ("fp8", "bf16") if flops[name]}
    }
    ideal |= {
        figure: {peak: flops["total"] / peaks[peak] / 1e6} for figure, peak in DENOMINATORS.items()
    }
    return [Bar(figure, percents[figure], 1e6 / tps, parts) for figure, parts in ideal.items()]


def draw(groups: dict[str, list[Bar]], output: Path) -> None:
    """Write `groups` of bars, by their titles, to the file `output`. Raises ConfigError without
    matplotlib."""
    try:  # optional, and slow to import
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError('this needs matplotlib: pip install "torchtitan-lite[plots]"') from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.375, 4.7), facecolor="white")  # 900 pixels wide
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.text(
            -31,
            0,
            "Microseconds of a token on each device: ideal, at the peak named, within real",
            size=11,
        )
        y = 0.0
        for title, bars in groups.items():
            y += 1.2
            axes.text(-31, y, title, weight="bold")
            for bar in bars:
                y += 0.9
                axes.text(-31, y, bar.figure, va="center")
                axes.barh(y, bar.real, height=0.7, color=COLORS["real"])
                axes.text(bar.real - 1, y, f"{bar.real:.1f} real", ha="right", va="center")
                axes.text(bar.real + 1.5, y, f"{bar.percent:.2f} %", va="center", weight="bold")
                left = 0.0
                for peak, microseconds in bar.ideal.items():
                    axes.barh(y, microseconds, left=left, height=0.7, color=COLORS[peak])
                    axes.text(left + 1, y, f"{microseconds:.1f} {peak}", color="white", va="center")
                    left += microseconds
        axes.set(xlim=(-33, 177), ylim=(y + 0.7, -0.8))
        figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})


def main(argv: list[str]) -> None:
    """Write the picture to the file that `argv` names. Raises ConfigError without matplotlib."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "docs/mfu.svg",
        help="SVG file (default: docs/mfu.svg)",
    )
    output = parser.parse_args(argv).output
    draw(
        {f"{name} at {tps:,} tokens/s": list_bars(file, tps) for name, (file, tps) in RUNS.items()},
        output,
    )


if __name__ == "__main__":
    run_script(main)
