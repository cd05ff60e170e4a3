"""Every row of docs/errors.md is what its arguments print, and none of them a traceback."""

import pytest
from bad_inputs import AT_START, BEFORE_START, make_files, row
from launching import ROOT

PAGE = (ROOT / "docs/errors.md").read_text().splitlines()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The page's row of each entry."""
    folder = tmp_path_factory.mktemp("inputs")
    make_files(folder)
    return {arguments: row(arguments, folder=folder) for arguments in (*BEFORE_START, *AT_START)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("arguments", [*BEFORE_START, *AT_START])
def test_bad_input_prints_what_the_page_says(arguments: str, rows: dict[str, str]) -> None:
    told = rows[arguments]
    assert told in PAGE
    code = int(told.split(" | ")[1])
    assert code == 2 if arguments in BEFORE_START else code in (2, 3, 4)
