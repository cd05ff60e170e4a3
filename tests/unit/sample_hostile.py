"""JSON documents with one value replaced by another that its reader does not expect."""

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from([0, -1, 1.5, 2**31, 2**63, 10**12, 10**400, 1e308, "8", "../x", "a\nb", "\0"]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
) | st.just(DEEP)


def edits(document: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Copies of a document, each with another value at one place."""

    def edit(place: tuple[Any, ...], value: Any) -> dict[str, Any]:
        edited = copy.deepcopy(document)
        inner: Any = edited
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        return edited

    return st.builds(edit, st.sampled_from(list(_places(document))), VALUES)


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value within a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in inner:
        yield (*place, key)
        if isinstance(each, (dict, list)):
            yield from _places(each, (*place, key))
