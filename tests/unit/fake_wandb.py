"""The part of wandb that is used, without a server."""

import sys
from types import ModuleType
from typing import Any

import pytest


class Error(Exception):
    """The root of wandb's own errors."""


class FakeRun:
    """A run that keeps what was logged: (step, figures) in `rows`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.id = options, options["id"] or "new-id"
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float | None] = {}
        self.finished = False

    def log(self, figures: dict[str, float], *, step: int) -> None:
        self.rows.append((step, figures))

    def finish(self) -> None:
        self.finished = True


class FakeWandb(ModuleType):
    """The module `wandb` of a test, with the runs that were opened."""

    Error = Error

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        monkeypatch.setitem(sys.modules, "wandb", self)

    def init(self, **options: Any) -> FakeRun:
        self.runs.append(FakeRun(options))
        return self.runs[-1]
