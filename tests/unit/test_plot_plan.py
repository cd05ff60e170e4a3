"""The picture in the docs: what it shows, its file, and what is said without matplotlib."""

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from torchtitan_lite.base.errors import ConfigError

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/mfu.svg"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("plot_plan", ROOT / "scripts/plot_plan.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "plot_plan", module)  # where dataclasses looks it up
    spec.loader.exec_module(module)
    return module


def texts(picture: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())


# ----- plot_plan -----


def test_the_picture_shows_the_planners_figures(script: ModuleType) -> None:
    expected = []
    for name, (file, tps) in script.RUNS.items():
        expected.append(f"{name} at {tps:,} tokens/s")
        for bar in script.list_bars(file, tps):
            assert sum(bar.ideal.values()) / bar.real == pytest.approx(bar.percent / 100)
            expected += [bar.figure, f"{bar.real:.1f} real", f"{bar.percent:.2f} %"]
            expected += [f"{microseconds:.1f} {peak}" for peak, microseconds in bar.ideal.items()]
    assert texts(PICTURE)[1:] == expected


def test_the_same_figures_make_the_same_file(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    once, again = tmp_path / "once.svg", tmp_path / "again.svg"
    for output in (once, again):
        script.main(["--output", str(output)])
    assert once.read_bytes() == again.read_bytes()
    assert texts(once) == texts(PICTURE)
    with pytest.raises(ConfigError, match=r"--output .*/none/x\.svg: No such file"):
        script.draw({}, tmp_path / "none/x.svg")


def test_without_matplotlib_the_extra_is_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib: pip install .*-lite\[plots\]"):
        script.draw({}, tmp_path / "picture.svg")
