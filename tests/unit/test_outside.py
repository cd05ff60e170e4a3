"""Code from outside the package that a config names, and the library's names."""

import math
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import torchtitan_lite
from torchtitan_lite.base.errors import ConfigError, DataError
from torchtitan_lite.base.outside import load_object
from torchtitan_lite.config import (
    BatchSizes,
    Config,
    LRSchedulerConfig,
    MetricsConfig,
    OptimizerConfig,
    TrainingConfig,
    load_config,
    outside_names,
)
from torchtitan_lite.data.dataloader import OutsideBatches
from torchtitan_lite.float8.convert import is_float8
from torchtitan_lite.metrics.base_writer import Writer
from torchtitan_lite.metrics.writers import build_writers
from torchtitan_lite.models.loss import CrossEntropy, OutsideLoss
from torchtitan_lite.training.build import build_outside_batches
from torchtitan_lite.training.optim import build_optimizer, set_learning_rate

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the working directory, where Python does not search by itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for name in ("own_code", "broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    Path("own_code.py").write_text(
        "import torch\n"
        "def make_sgd(groups, config): return torch.optim.SGD(groups, lr=config.lr)\n"
        "def nothing(*_, **__): pass\n"
        "def with_place(job, tokenizer, *, dp_rank, dp_degree, first_sample): yield first_sample\n"
        "def without(job, tokenizer, *, dp_rank, dp_degree): yield dp_rank, dp_degree\n"
    )
    Path("random.py").write_text("raise RuntimeError('not the standard library')")
    Path("broken.py").write_text("1 / 0")


# ----- load_object -----


def test_load_object_from_the_working_directory_which_hides_no_other_module():
    assert load_object("[optimizer] name", "own_code:make_sgd").__name__ == "make_sgd"
    monkeypatched = sys.modules.pop("random")
    try:
        assert hasattr(load_object("[experimental] custom_import", "random"), "randrange")
    finally:
        sys.modules["random"] = monkeypatched


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("nowhere:f", r'\[training] loss names module "nowhere".*ModuleNotFoundError'),
        ("broken:f", r'\[training] loss names module "broken".*ZeroDivisionError'),
        ("own_code:missing", r'\[training] loss = "own_code:missing": own_code has no missing'),
    ],
)
def test_load_object_names_the_key(reference, says):
    with pytest.raises(ConfigError, match=says):
        load_object("[training] loss", reference)


# ----- In a config -----


@pytest.mark.parametrize("value", ["sgd", "a:", ":b", "a:b:c", "a b:c", "../a:b", "a:b()"])
def test_a_config_refuses_what_is_neither_a_name_nor_of_a_module(value):
    with pytest.raises(ConfigError, match=r"name = .*: must be 'AdamW', .* or module:name"):
        load_config(["--job.config_file=debug_model", f"--optimizer.name={value}"])


def test_outside_names():
    config = load_config(
        [
            "--job.config_file=debug_model",
            "--training.after_step=a:f,b.c:g",
            "--lr_scheduler.decay_type=d:h",
            "--experimental.custom_import=e",
        ]
    )
    assert outside_names(config) == {
        "a:f": "[training] after_step",
        "b.c:g": "[training] after_step",
        "d:h": "[lr_scheduler] decay_type",
        "e": "[experimental] custom_import",
    }
    assert outside_names(Config()) == {}


# ----- Optimizer and loss -----


def test_build_optimizer_from_outside():
    weight = torch.nn.Parameter(torch.ones(2))
    config = OptimizerConfig(name="own_code:make_sgd", lr=0.5)
    optimizer = build_optimizer([weight], config)
    assert isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["lr"] == 0.5
    with pytest.raises(ConfigError, match=r'"own_code:nothing" must return a torch.optim.Opt'):
        build_optimizer([weight], OptimizerConfig(name="own_code:nothing"))


def test_outside_loss_is_a_sum_like_the_cross_entropy(monkeypatch):
    logits, labels = torch.randn(2, 3, 5), torch.tensor([[1, 2, -100], [0, 4, 3]])

    def summed(logits: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        )

    module = SimpleNamespace(summed=summed, mean_of_rows=lambda x, _: x.sum(-1), one=lambda *_: 1.0)
    monkeypatch.setitem(sys.modules, "own_code", module)
    expected = CrossEntropy(compiled=False)(logits, None, labels, scale=0.5)
    found = OutsideLoss("own_code:summed")(logits, None, labels, scale=0.5)
    torch.testing.assert_close(found, expected)
    for name in ("mean_of_rows", "one"):
        with pytest.raises(ConfigError, match=rf'\[training] loss = "own_code:{name}" must return'):
            OutsideLoss(f"own_code:{name}")(logits, None, labels)


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_set_learning_rate_refuses_what_is_no_number(share, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_code", SimpleNamespace(decay=lambda progress: share))
    scheduler = LRSchedulerConfig(decay_type="own_code:decay", warmup_steps=1)
    config, optimizer = Config(lr_scheduler=scheduler), torch.optim.SGD([torch.ones(1)], lr=0.1)
    set_learning_rate(optimizer, config, step=1, last_step=9)
    with pytest.raises(ConfigError, match=r'decay_type = "own_code:decay" .* step 2 '):
        set_learning_rate(optimizer, config, step=2, last_step=9)


# ----- OutsideBatches -----


def batches(*given: tuple[Tensor, Tensor]) -> OutsideBatches:
    return OutsideBatches(
        name="a:f",
        batches=iter(given),
        seq_len=4,
        vocab_size=10,
        sizes=BatchSizes(2, 4, 2),
        dp_rank=0,
        dp_degree=1,
        steps=3,
    )


GOOD = torch.zeros(2, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("tokens", "labels", "says"),
    [
        (GOOD[:1], GOOD, r"int64 \[1, 4]"),
        (GOOD.int(), GOOD, r"int32 \[2, 4]"),
        (GOOD + 10, GOOD, "10 to 10"),
        (GOOD - 100, GOOD, "-100 to -100"),
        (GOOD, GOOD - 1, None),
        (GOOD, GOOD - 101, "-101 to -101"),
    ],
)
def test_outside_batches_refuses_what_the_model_cannot_take(tokens, labels, says):
    found: Iterator[Any] = iter(batches((tokens, labels)))
    if says is None:
        assert len(next(found)) == 2
        return
    with pytest.raises(DataError, match=rf'\[training] dataset = "a:f": .*{says}.*\[2, 4], ids'):
        next(found)


def test_outside_batches_end_is_an_error():
    found = iter(batches((GOOD, GOOD)))
    assert next(found)[0] is GOOD
    with pytest.raises(DataError, match=r'dataset = "a:f" ended'):
        next(found)


def job_of(dataset: str, *, saves: bool) -> Any:
    config = SimpleNamespace(
        training=TrainingConfig(dataset=dataset), checkpoint=SimpleNamespace(enable=saves)
    )
    return SimpleNamespace(config=config, model_args=SimpleNamespace(vocab_size=10))


def test_build_outside_batches_needs_a_place_to_resume_at():
    place = {"sizes": BatchSizes(2, 4, 2), "dp_rank": 1, "dp_degree": 2, "steps": 3}
    place |= {"first_step": 3, "first_sample": 8}
    tokenizer: Any = None

    def first(dataset: str, *, saves: bool) -> object:
        job = job_of(dataset, saves=saves)
        return next(iter(build_outside_batches(job, tokenizer, **place).batches))

    assert first("own_code:with_place", saves=True) == 8
    assert first("own_code:without", saves=False) == (1, 2)
    with pytest.raises(ConfigError, match=r'dataset = "own_code:without" takes no first_sample'):
        first("own_code:without", saves=True)
    with pytest.raises(ConfigError, match=r'dataset = "own_code:nothing" must return an iterator'):
        first("own_code:nothing", saves=False)


# ----- Writers -----


def test_build_writers_adds_those_from_outside(monkeypatch):
    class Own(Writer):
        def __init__(self, run: object) -> None:
            self.run = run

    monkeypatch.setitem(sys.modules, "own_code", SimpleNamespace(Own=Own))
    metrics = MetricsConfig(writers=("own_code:Own",), save_for_all_ranks=True)
    metrics = metrics.model_copy(update={"enable_tensorboard": False})
    run: Any = SimpleNamespace(rank=1, folder=Path())
    (writer,) = build_writers(metrics, run)
    assert isinstance(writer, Own) and writer.run is run
    monkeypatch.setitem(sys.modules, "own_code", SimpleNamespace(Own=str))
    with pytest.raises(ConfigError, match=r'writers = "own_code:Own" must be a subclass of Writer'):
        build_writers(metrics, run)


# ----- convert_to_float8, count_flops, generate: for any program -----


def other_model() -> torch.nn.Sequential:
    """A model with other names and biases."""
    names = {"stem": torch.nn.Linear(32, 64), "act": torch.nn.GELU()}
    names |= {"lm_head": torch.nn.Linear(64, 48)}
    return torch.nn.Sequential(OrderedDict(names))


def test_convert_to_float8_and_count_flops_of_any_model():
    model = other_model().bfloat16()
    matmuls = torchtitan_lite.convert_to_float8(model, "rowwise_with_gw_hp", tokens=7)
    assert matmuls == {"stem": ("output", "grad_input")}  # no float8 matmul sums over the tokens
    assert is_float8(model.stem) and type(model.lm_head) is torch.nn.Linear

    x = torch.randn(16, 32, dtype=torch.bfloat16)
    expected = other_model().bfloat16()
    expected.load_state_dict(model.state_dict())
    difference = (model(x) - expected(x)).float().norm() / expected(x).float().norm()
    assert 0 < difference < 0.1
    model(x).sum().backward()
    assert model.stem.weight.grad is not None

    ledger = torchtitan_lite.count_flops(
        model, n_layers=1, q_dim=64, seq_len=10, float8_matmuls=matmuls
    )
    attention = 12 * 64 * 10
    in_float8 = 4 * 32 * 64
    assert ledger.by_precision["fp8"] == in_float8
    assert ledger.total == 6 * (32 * 64 + 64 * 48) + attention


def test_convert_to_float8_refuses_sizes():
    model = torch.nn.Sequential(torch.nn.Linear(32, 20))
    with pytest.raises(ConfigError, match="out_features 20.*16"):
        torchtitan_lite.convert_to_float8(model)
    with pytest.raises(ConfigError, match='"row" is none of tensorwise, '):
        torchtitan_lite.convert_to_float8(other_model(), "row")
    with pytest.raises(ConfigError, match="= 7 tokens"):
        torchtitan_lite.convert_to_float8(other_model(), tokens=7)


# ----- The library -----


def test_every_name_of_the_library_is_there_and_documented():
    page = (ROOT / "docs/library.md").read_text()
    for name in torchtitan_lite.__all__:
        assert getattr(torchtitan_lite, name) is not None
        assert f"`{name}" in page
    with pytest.raises(AttributeError, match="attribute trainer"):
        torchtitan_lite.trainer  # noqa: B018


def test_load_config_from_the_library_imports_no_torch():
    code = "import sys, torchtitan_lite as t; t.load_config(['--job.config_file=debug_model'])\n"
    code += "t.build_job, t.Writer.write; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
