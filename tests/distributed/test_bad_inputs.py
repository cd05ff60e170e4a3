"""What is refused ends with an exit code and names what is wrong; docs/errors.md lists it."""

import re
from collections.abc import Callable
from functools import cache, partial

import pytest
from bad_inputs import AT_START, BEFORE_START, make_files, page, refuse, table
from launching import ROOT

Refuse = Callable[[str], tuple[int, str]]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Refuse:
    """Return a function that gives the exit code and the message for some arguments."""
    folder = tmp_path_factory.mktemp("inputs")
    make_files(folder)
    return cache(partial(refuse, folder=folder))


def assert_named(arguments: str, message: str) -> None:
    """Assert that a message has the key, the value or the table of the last option or variable."""
    words = re.findall(r"[\w./]+", re.split(r"--| (?=[A-Z]+=)", arguments)[-1])
    names = [*words, words[0].rpartition(".")[2], f"[{words[0].partition('.')[0]}] ("]
    assert any(name in message for name in names), message


# ----- launch, ConfigError -----
@pytest.mark.quick
@pytest.mark.parametrize("arguments", BEFORE_START)
def test_launch_refuses_a_bad_config(arguments: str, refused: Refuse) -> None:
    code, message = refused(arguments)
    assert code == 2
    assert_named(arguments, message)


# ----- train, RunError -----
@pytest.mark.parametrize("arguments", AT_START)
def test_train_refuses_bad_files(arguments: str, refused: Refuse) -> None:
    code, message = refused(arguments)
    assert code in (2, 3, 4)
    assert_named(arguments, message)


# ----- errors.md -----
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rows", [BEFORE_START, AT_START], ids=["before start", "at start"])
def test_errors_page_has_the_generated_table(rows: list[str], refused: Refuse) -> None:
    assert table(rows, refused) in (ROOT / "docs/errors.md").read_text()


@pytest.mark.quick
def test_errors_page_has_the_generated_text() -> None:
    pages = (ROOT / "docs/errors.md").read_text(), page(lambda arguments: (0, ""))
    shown, generated = (re.sub(r"^\| `.*\n", "", text, flags=re.M) for text in pages)
    assert shown == generated
