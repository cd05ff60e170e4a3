"""The table of keys, its documentation, and how messages name keys and values."""

from pathlib import Path

import pytest

from torchtitan_lite.cli.schema import PAGE
from torchtitan_lite.config.keys import (
    KEYS,
    TABLES,
    closest,
    did_you_mean,
    format_help,
    show,
    show_key,
)

# ----- KEYS, TABLES -----


@pytest.mark.parametrize(("name", "kind", "type_text", "optional", "default"), [
    ("training.steps", "integer", "integer", False, 1000),
    ("compile.enable", "boolean", "boolean", False, False),
    ("job.dump_folder", "string", "string", False, "./outputs"),
    ("lr_scheduler.decay_ratio", "number", "number", True, None),
    ("model.rope_scaling", "object", "{factor, low_freq_factor, high_freq_factor, "
     "original_max_position_embeddings}", True, None),
    ("validation.dataset", "string", '"pystdlib"|"c4"|"c4_test"|"c4_validation"', True, None),
    ("lr_scheduler.decay_type", "string", '"linear"|"sqrt"|"cosine"|"module:name"', False,
     "linear"),
    ("metrics.writers", "array", 'array of "module:name"', False, []),
    ("training.datasets", "array", "array of {path, weight}", False, []),
    ("compile.components", "array", 'array of "model"|"loss"', False, ["model", "loss"]),
    ("optimizer.lr_factors", "object", "object", False, {}),
])  # fmt: skip
def test_a_key_has_the_type_and_default_of_its_field(name, kind, type_text, optional, default):
    key = KEYS[name]
    found = (key.kind, key.type_text, key.optional, key.default)
    assert found == (kind, type_text, optional, default)


def test_every_key_is_of_a_known_kind_and_documented_in_one_line():
    for name, key in KEYS.items():
        assert key.kind in ("boolean", "integer", "number", "string", "array", "object"), name
        assert key.doc and "\n" not in key.doc, name
        assert name == f"{key.table}.{key.name}" and key.table in TABLES


# ----- show, show_key, closest, did_you_mean -----


@pytest.mark.parametrize(("value", "shown"), [
    ("é\n", '"é\\n"'),
    (("a", "b"), '["a", "b"]'),
    (True, "true"),
    (None, "unset"),
    ({"a": 1, "b": "c"}, '{ a = 1, b = "c" }'),
])  # fmt: skip
def test_show(value, shown):
    assert show(value) == shown


def test_show_key():
    assert show_key("training.steps") == "[training] steps"
    assert show_key("quantize.linear.float8.emulate") == "[quantize.linear.float8] emulate"
    assert show_key("steps") == "steps"


def test_closest_ignores_case_and_refuses_what_is_far():
    assert closest("8b", ["debugmodel", "8B", "70B"]) == "8B"
    assert closest("local-batch-size", ["local_batch_size", "steps"]) == "local_batch_size"
    assert closest("momentum", ["lr", "steps"]) is None
    assert did_you_mean("tensorwize", ["tensorwise", "rowwise"]) == '; did you mean "tensorwise"?'
    assert did_you_mean("xyz", ["tensorwise", "rowwise"]) == ""


# ----- format_help -----


def test_help_documents_every_key_in_100_columns():
    page = format_help()
    assert max(map(len, page.splitlines())) <= 100
    options = [line.split()[0] for line in page.splitlines() if line.startswith("  --")]
    assert options == [f"--{name}" for name in KEYS]
    assert '"sqrt"|"cosine"|"module:name" (default: "linear")\n      Shape' in page
    assert "\n[training]\n  --training.dataset " in page
    assert "  --training.dataset_path string (default: unset)\n" in page
    assert "--job.config_file names" in page and 'base = "other.toml"' in page


def test_config_page_is_the_one_in_docs():
    page = PAGE.format(format_help())
    assert page == (Path(__file__).parents[2] / "docs/config.md").read_text()
