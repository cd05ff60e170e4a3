from pathlib import Path

from torchtitan_lite.config.help import format_config_page, format_help
from torchtitan_lite.config.keys import KEYS


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
