import pytest

from torchtitan_lite.config.keys import KEYS
from torchtitan_lite.config.layers import Setting, resolve_aliases
from torchtitan_lite.config.torchtitan import ALIASES, current_name


@pytest.mark.parametrize(
    ("old", "new", "notice"),
    [
        ("training.compile", "compile.enable", "[training] compile is now [compile] enable"),
        (
            "training.batch_size",
            "training.local_batch_size",
            "[training] batch_size is now [training] local_batch_size",
        ),
        ("training.seed", "debug.seed", "[training] seed is now [debug] seed"),
        (
            "training.deterministic",
            "debug.deterministic",
            "[training] deterministic is now [debug] deterministic",
        ),
        (
            "training.tensor_parallel_degree",
            "parallelism.tensor_parallel_degree",
            "[training] tensor_parallel_degree is now [parallelism] tensor_parallel_degree",
        ),
        (
            "checkpoint.enable_checkpoint",
            "checkpoint.enable",
            "[checkpoint] enable_checkpoint is now [checkpoint] enable",
        ),
        (
            "checkpoint.model_weights_only",
            "checkpoint.last_save_model_only",
            "[checkpoint] model_weights_only is now [checkpoint] last_save_model_only",
        ),
        (
            "training.disable_loss_parallel",
            "parallelism.disable_loss_parallel",
            "[training] disable_loss_parallel is now [parallelism] disable_loss_parallel",
        ),
        (
            "scheduler.lr_min",
            "lr_scheduler.min_lr_factor",
            "[scheduler] lr_min is now [lr_scheduler] min_lr_factor",
        ),
        (
            "lr_scheduler.lr_min",
            "lr_scheduler.min_lr_factor",
            "[lr_scheduler] lr_min is now [lr_scheduler] min_lr_factor",
        ),
        (
            "model.hf_assets_path",
            "model.tokenizer_path",
            "[model] hf_assets_path is now [model] tokenizer_path",
        ),
        ("job.print_args", "job.print_config", "[job] print_args is now [job] print_config"),
        (
            "quantize.linear.float8.recipe_name",
            "float8.recipe_name",
            "[quantize.linear.float8] recipe_name is now [float8] recipe_name",
        ),
    ],
)
def test_alias_moves_its_value_and_says_so(
    old: str, new: str, notice: str, notices: pytest.LogCaptureFixture
) -> None:
    resolved, problems = resolve_aliases({old: Setting(7, "run.toml")})
    assert problems == []
    assert list(resolved) == [new]
    assert resolved[new].value == 7
    assert resolved[new].source == f"run.toml, as {notice.split(' is now ')[0]}"
    assert notices.messages == [notice]


def test_every_alias_stands_for_a_key_and_hides_none() -> None:
    assert set(ALIASES.values()) <= KEYS.keys()
    assert ALIASES.keys().isdisjoint(KEYS)


def test_current_names_stay(notices: pytest.LogCaptureFixture) -> None:
    layer = {"training.steps": Setting(3, "run.toml"), "no.such": Setting(4, "run.toml")}
    assert resolve_aliases(layer) == (layer, [])
    assert notices.messages == []
    assert current_name("quantize.linear.float8") == "float8"
    assert current_name("quantize.linear.float80.emulate") == "quantize.linear.float80.emulate"


@pytest.mark.parametrize(
    ("converters", "enabled"),
    [
        (["float8"], True),
        (["quantize.linear.float8"], True),
        ([], False),
        ("float8", True),  # the last two as the command line writes them
        ("", False),
        (["mx"], True),
        ("quantize.linear.mx", True),
    ],
)
def test_converters_become_the_float8_switch(converters: object, enabled: bool) -> None:
    resolved, problems = resolve_aliases({"model.converters": Setting(converters, "run.toml")})
    assert problems == []
    assert resolved["float8.enable_float8_linear"].value is enabled


@pytest.mark.parametrize("converters", [["lora"], ["float8", "mx"], True, {}, [["float8"]]])
def test_other_converters_are_refused(converters: object) -> None:
    resolved, problems = resolve_aliases({"model.converters": Setting(converters, "run.toml")})
    assert resolved == {}
    assert len(problems) == 1
    assert (
        '(from run.toml): must be ["quantize.linear.float8"], ["quantize.linear.mx"]' in problems[0]
    )


@pytest.mark.parametrize(
    "names", [("training.compile", "compile.enable"), ("compile.enable", "training.compile")]
)
def test_old_and_new_name_must_agree(names: tuple[str, str]) -> None:
    old, new = Setting(True, "run.toml"), Setting(False, "run.toml")
    by_name = {"training.compile": old, "compile.enable": new}
    _, problems = resolve_aliases({name: by_name[name] for name in names})
    assert problems == [
        "[training] compile = true (from run.toml): contradicts [compile] enable = false (from "
        "run.toml); "
        "keep the latter"
    ]
    resolved, problems = resolve_aliases({"training.compile": old, "compile.enable": old})
    assert problems == []
    assert resolved == {"compile.enable": old}
