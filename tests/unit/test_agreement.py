"""What ranks say that were not started alike; tests/distributed has nodes that are not."""

import re

import pytest

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.run import process_group

FACTS = {"[optimizer] lr": "0.0008", "torch": "2.13.0"}
OTHER = {"[optimizer] lr": "0.5", "torch": "2.11.0"}
LR = r"^\[optimizer\] lr .*: 0\.0008 \(rank 0 on H\); 0\.5 \(rank 2 on H\)$"
TORCH = r"^torch differs .*: 2\.13\.0 \(rank 0 on H\); 2\.11\.0 \(rank 1 on H\)$"


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        ([FACTS], []),
        ([FACTS] * 3, []),
        ([FACTS, FACTS, OTHER], [LR, r"^torch .*: 2\.13\.0 \(.*\); 2\.11\.0 \(rank 2 on H\)$"]),
        ([FACTS | {"k": "1"}, FACTS], [r"^k .*: 1 \(rank 0 on H\); none \(rank 1 on H\)$"]),
        ([FACTS, FACTS | {"k": "1"}], [r"^k .*: none \(rank 0 on H\); 1 \(rank 1 on H\)$"]),
        ([FACTS] + [FACTS | {"torch": "2.11.0"}] * 9, [TORCH]),  # only the first is named
    ],
)
def test_check_started_alike(facts, lines, monkeypatch):
    answers = [("H", each) for each in facts]
    monkeypatch.setattr(process_group, "on_all_ranks", lambda own: answers)
    if not lines:
        process_group.check_started_alike(facts[0])
        return
    with pytest.raises(ConfigError) as error:
        process_group.check_started_alike(facts[0])
    *found, fix = str(error.value).splitlines()
    for line, expected in zip(found, lines, strict=True):
        assert re.search(expected, line)
    assert fix.startswith("start every node with the same config")
