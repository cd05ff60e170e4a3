"""Every row of docs/errors.md is what its arguments get, and none of them a traceback."""

from pathlib import Path

import pytest
from bad_inputs import AT_START, BEFORE_START, make_files, row
from launching import ROOT

PAGE = (ROOT / "docs/errors.md").read_text().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    make_files(path)
    return path


@pytest.mark.parametrize("arguments", [*BEFORE_START, *AT_START])
def test_bad_input_is_told_what_the_page_says(arguments: str, folder: Path) -> None:
    told = row(arguments, folder=folder)
    assert told in PAGE
    code = int(told.split(" | ")[1])
    assert code == 2 if arguments in BEFORE_START else code in (2, 3, 4)
