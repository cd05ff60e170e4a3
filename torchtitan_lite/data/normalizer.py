"""Bounds on what the normalizer of a tokenizer.json makes of a text.

Anyone may have written the file, and a rule of a few bytes can replace each character by megabytes.
The package tokenizers has no limit, and takes about 30 bytes of memory for each byte that it makes.
"""

import base64
import json
import math
from typing import Any

MAX_GROWTH = 2**16
"""Bytes that a byte of text may become."""
GROWTH = {"Strip": 1, "StripAccents": 1, "Nmt": 1, "Fuse": 1, "Lowercase": 2, "NFC": 3, "NFD": 3}
OTHER_GROWTH = 11
"""Growth by other steps: NFKC and NFKD have this (https://unicode.org/faq/normalization.html)."""


def find_growth(step: dict[str, Any]) -> int:
    """Return how many bytes a step of a normalizer or decoder makes of one at most."""
    kind = step["type"]
    if kind == "Sequence":
        return math.prod(map(find_growth, step.get("normalizers") or step.get("decoders") or []))
    if kind == "Replace":
        new = len(step["content"].encode())
        old = len(step["pattern"].get("String", "").encode())
        # A regular expression can match nothing, in front of every byte.
        return max(1, math.ceil(new / old)) if old else 1 + new
    if kind == "Prepend":
        return 1 + len(step["prepend"].encode())
    if kind == "Precompiled":
        # The size of a trie, the trie, and the replacements, each with a zero at its end.
        content = base64.b64decode(step["precompiled_charsmap"] or "")
        replacements = content[4 + int.from_bytes(content[:4], "little") :]
        return max(1, *map(len, replacements.split(b"\0")))
    return GROWTH.get(kind, OTHER_GROWTH)


def check_growth(part: Any) -> int:
    """Return the growth of a normalizer or decoder of the package tokenizers, or of None. Raises
    ValueError if it is above MAX_GROWTH."""
    growth = 1 if part is None else find_growth(json.loads(part.__getstate__()))
    if growth > MAX_GROWTH:
        raise ValueError(f"has rules that make up to {growth:,} bytes of one, above {MAX_GROWTH:,}")
    return growth
