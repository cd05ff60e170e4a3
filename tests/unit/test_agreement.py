"""What ranks say that were not started alike; tests/distributed has nodes that are not."""

import re

import pytest

from torchtitan_lite.run.process_group import describe_differences

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
def test_describe_differences(facts, lines):
    found = describe_differences([("H", each) for each in facts])
    for line, expected in zip(found, lines, strict=True):
        assert re.search(expected, line)
