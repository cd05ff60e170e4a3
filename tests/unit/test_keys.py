from pathlib import Path

import pytest

from torchtitan_lite.config.keys import (
    KEYS,
    TABLES,
    closest,
    did_you_mean,
    format_config_page,
    format_help,
    show,
    show_key,
)


@pytest.mark.parametrize(
    ("name", "kind", "type_text", "optional", "default"),
    [
        ("training.steps", "int", "int", False, 1000),
        ("optimizer.lr", "float", "float", False, 8e-4),
        ("compile.enable", "bool", "bool", False, False),
        ("job.dump_folder", "str", "str", False, "./outputs"),
        ("lr_scheduler.total_steps", "int", "int", True, None),
        ("lr_scheduler.decay_ratio", "float", "float", True, None),
        ("training.dataset_path", "str", "str", True, None),
        ("validation.dataset", "str", '"pystdlib"|"c4"|"c4_test"|"c4_validation"', True, None),
        ("lr_scheduler.decay_type", "str", '"linear"|"sqrt"|"cosine"', False, "linear"),
        ("float8.filter_fqns", "list", "list", False, []),
        ("training.datasets", "list", "list of {path, weight}", False, []),
        ("training.epochs", "float", "float", True, None),
        ("model.dim", "int", "int", True, None),
        ("compile.components", "list", 'list of "model"|"loss"', False, ["model", "loss"]),
    ],
)
def test_key_says_what_its_section_says(
    name: str, kind: str, type_text: str, optional: bool, default: object
) -> None:
    key = KEYS[name]
    assert (key.kind, key.type_text, key.optional, key.default) == (
        kind,
        type_text,
        optional,
        default,
    )


def test_every_key_is_of_a_known_kind_and_documented_in_one_line() -> None:
    for name, key in KEYS.items():
        assert key.kind in ("bool", "int", "float", "str", "list", "table"), name
        assert key.doc and "\n" not in key.doc, name
        assert name == f"{key.table}.{key.name}" and key.table in TABLES


def test_show() -> None:
    assert show("é\n") == '"é\\n"'
    assert show(("a", "b")) == '["a", "b"]'
    assert show(True) == "true"
    assert show(None) == "unset"


def test_show_key() -> None:
    assert show_key("training.steps") == "[training] steps"
    assert show_key("quantize.linear.float8.emulate") == "[quantize.linear.float8] emulate"
    assert show_key("steps") == "steps"


def test_closest_ignores_case_and_refuses_what_is_far() -> None:
    assert closest("8b", ["debugmodel", "8B", "70B"]) == "8B"
    assert closest("local-batch-size", ["local_batch_size", "steps"]) == "local_batch_size"
    assert closest("momentum", ["lr", "steps"]) is None


def test_did_you_mean() -> None:
    assert did_you_mean("tensorwize", ["tensorwise", "rowwise"]) == '; did you mean "tensorwise"?'
    assert did_you_mean("xyz", ["tensorwise", "rowwise"]) == ""


def test_help_documents_every_key() -> None:
    page = format_help()
    assert [line.split()[0] for line in page.splitlines() if line.startswith("  --")] == [
        f"--{name}" for name in KEYS
    ]
    assert (
        '  --lr_scheduler.decay_type "linear"|"sqrt"|"cosine" (default: "linear")\n      Shape of '
        "the decay.\n" in page
    )
    assert "\n[training]\n  --training.dataset " in page
    assert "  --training.dataset_path str (default: unset)\n" in page


def test_help_documents_the_file_and_its_base() -> None:
    page = format_help()
    assert "--job.config_file names the TOML file of the run" in page
    assert 'base = "other.toml"' in page


def test_help_fits_a_terminal_of_100_columns() -> None:
    assert max(map(len, format_help().splitlines())) <= 100


def test_the_page_of_keys_is_the_one_in_docs() -> None:
    page = format_config_page()
    assert page == (Path(__file__).parents[2] / "docs/config.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [key.name for key in KEYS.values()]
    assert (
        r'| `decay_type` | `"linear"\|"sqrt"\|"cosine"` | `"linear"` | Shape of the decay. |'
        in rows
    )
