"""The part of wandb that is used, without a server."""

import sys
from types import ModuleType
from typing import Any

import pytest


class Error(Exception):
    """wandb's own root of its errors, of which a UsageError (no login) and a CommError (no network)
    are kinds."""


class FakeRun:
    """What was logged to a run: (step, figures) in `rows`. With `broken` set, nothing can be logged
    any more."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.id = options["id"] or "new-id"
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, float | None] = {}
        self.finished = False
        self.broken = False

    def log(self, figures: dict[str, float], *, step: int) -> None:
        if self.broken:
            raise ConnectionResetError("Connection reset by peer")
        self.rows.append((step, figures))

    def finish(self) -> None:
        if self.broken:
            raise ConnectionResetError("Connection reset by peer")
        self.finished = True


class FakeWandb(ModuleType):
    """The module `wandb` of a test. `runs` are those that were opened; `refusal` is what opening
    one raises."""

    Error = Error

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("wandb")
        self.runs: list[FakeRun] = []
        self.refusal: Error | None = None
        monkeypatch.setitem(sys.modules, "wandb", self)

    def init(self, **options: Any) -> FakeRun:
        if self.refusal is not None:
            raise self.refusal
        self.runs.append(FakeRun(options))
        return self.runs[-1]
