"""Draw how the MFU figures relate: python scripts/plot_plan.py [--output docs/mfu.svg].

The picture shows Llama 3 8B on 8 H100 at the published speeds of bf16 and float8: the time of a
token, and the time that its matmuls would take at the peak that each figure assumes. The planner
computes the figures. Needs the plots extra. Equal figures make equal files.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.base.terminal import run_script
from torchtitan_lite.config import load_config
from torchtitan_lite.planner.plan import find_device, plan

ROOT = Path(__file__).parents[1]
WORLD_SIZE = 8
RUNS = {"bf16": ("llama3_8b.toml", 6297), "float8": ("llama3_8b_float8.toml", 7773)}
"""Config, and tokens per second per device."""
DENOMINATORS = {"mfu_bf16_peak": "bf16", "mfu_arithmetic_peak": "arithmetic", "mfu_fp8_peak": "fp8"}
"""Figures that divide all FLOPs by one peak."""
COLORS = {"bf16": "#2f6690", "fp8": "#c8553d", "arithmetic": "#7d6b91", "real": "#e3e6ea"}
STYLE: Any = {  # matplotlib names each key
    "font.size": 9,
    "text.color": "#22272e",
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mfu",  # or ids are random
}


@dataclass(frozen=True)
class Bar:
    """A figure: ideal over real time of a token on one device, in microseconds."""

    figure: str
    percent: float
    real: float
    ideal: dict[str, float]
    """Ideal time at each assumed peak."""


def list_bars(file: str, tps: float) -> list[Bar]:
    """Return the figures of the shipped config `file` at `tps` tokens per second, `mfu` first."""
    config = load_config(
        ["--job.config_file", str(ROOT / "train_configs" / file)], world_size=WORLD_SIZE
    )
    found = plan(config, world_size=WORLD_SIZE, device=find_device("H100 SXM"), tps=tps)
    flops, percents, device = found["flops_per_token"], found["schedule"], found["device"]
    peaks = {
        "bf16": device["bf16_tflops"],
        "fp8": device["fp8_tflops"],
        "arithmetic": percents["arithmetic_peak"],
    }
    ideal = {
        "mfu": {name: flops[name] / peaks[name] / 1e6 for name in ("fp8", "bf16") if flops[name]}
    }
    ideal |= {
        figure: {peak: flops["total"] / peaks[peak] / 1e6} for figure, peak in DENOMINATORS.items()
    }
    return [Bar(figure, percents[figure], 1e6 / tps, parts) for figure, parts in ideal.items()]


def draw(groups: dict[str, list[Bar]], output: Path) -> None:
    """Draw `groups` of bars, each under its title, into the file `output`. Raises ConfigError
    without matplotlib, and for a file that cannot be written."""
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

        # A grey bar for the real time of a token, and within it the ideal time at each peak.
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
        try:
            figure.savefig(output, format="svg", metadata={"Date": None, "Creator": None})
        except OSError as error:
            raise ConfigError(f"--output {output}: {error.strerror}") from error


def main(argv: list[str]) -> None:
    """Draw the picture into the file named in `argv`. Raises ConfigError without matplotlib."""
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
