"""Every reader of a file that anyone may have written: it reads the file, or raises DataError."""

import gzip
import json
from contextlib import suppress
from pathlib import Path

import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st
from sample_stores import write_store
from test_vocabularies import BYTES, tiktoken_file

from torchtitan_lite.base.errors import DataError
from torchtitan_lite.base.jsonfile import write_hashed_json
from torchtitan_lite.data.sources import open_source
from torchtitan_lite.data.store_writer import hash_ids
from torchtitan_lite.data.token_store import TokenStore, find_damage, read_manifest
from torchtitan_lite.data.tokenizer import SHIPPED_MODEL, build_tokenizer

FUZZ = settings(max_examples=200, deadline=None)
JSONL = b"".join(b'{"id": %d, "text": "text %d"}\n' % (i, i) for i in range(30))
EDIT = st.tuples(st.floats(0, 1), st.integers(0, 9), st.binary(max_size=9))
NUMBERS = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**400, -(10**4000), 0.5, 2.0, 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5) | st.sampled_from(["\ud800", "<u4"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@st.composite
def changed(draw: st.DrawFn, sound: bytes) -> bytes:
    """Draw any bytes, or the sound ones after some edits."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    content = bytearray(sound)
    for share, removed, inserted in draw(st.lists(EDIT, min_size=1, max_size=4)):
        place = int(share * len(content))
        content[place : place + removed] = inserted
    return bytes(content[: draw(st.integers(0, 3 * len(content)))])


@st.composite
def changed_fields(draw: st.DrawFn, sound: object) -> object:
    """Draw the sound JSON value with one value in it, at any depth, replaced or removed."""
    if draw(st.integers(0, 3)) == 0 or not isinstance(sound, dict | list) or not sound:
        return draw(VALUES)
    places = list(sound) if isinstance(sound, dict) else range(len(sound))
    place = draw(st.sampled_from(places))
    result = sound.copy()
    if draw(st.integers(0, 5)) == 0:
        del result[place]
    else:
        result[place] = draw(changed_fields(sound[place]))
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# ----- TokenStore, find_damage -----


def use_store(store: Path) -> None:
    """Read a store in every way."""
    with suppress(DataError):
        find_damage(store, read_manifest(store), read=True)
    with suppress(DataError):
        hash_ids(TokenStore(store))


@pytest.fixture(scope="module")
def store(folder: Path) -> Path:
    return write_store(folder / "store", [[10, 11, 12], [20], [30, 31, 32, 33, 34, 35], []])


@pytest.fixture(scope="module")
def manifest(store: Path) -> bytes:
    return (store / "manifest.json").read_bytes()


@FUZZ
@given(data=st.data(), hashed=st.booleans())
def test_manifests(store, manifest, data, hashed):
    if hashed:
        fields = json.loads(manifest)
        del fields["sha256"]
        found = data.draw(changed_fields(fields))
        write_hashed_json(
            store / "manifest.json", found if isinstance(found, dict) else {"x": found}
        )
    else:
        (store / "manifest.json").write_bytes(data.draw(changed(manifest)))
    use_store(store)


# ----- build_tokenizer -----

TIKTOKEN = tiktoken_file([*BYTES, b"on", b"one"])


def use_tokenizer(path: Path) -> None:
    with suppress(DataError):
        tokenizer = build_tokenizer(str(path))
        tokenizer.decode(tokenizer.encode_documents(["one <s> \u00e9 12"])[0])


@FUZZ
@given(data=st.data())
def test_models(folder, data):
    sound = data.draw(st.sampled_from([SHIPPED_MODEL.read_bytes(), TIKTOKEN]))
    (folder / "tokenizer.model").write_bytes(data.draw(changed(sound)))
    use_tokenizer(folder / "tokenizer.model")


def json_tokenizer() -> bytes:
    """A small tokenizer.json with all of its parts."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({"o": 0, "n": 1, "on": 2, "<unk>": 3}, [("o", "n")])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer.to_str().encode()


@FUZZ
@given(data=st.data(), whole=st.booleans())
def test_tokenizer_jsons(folder, data, whole):
    sound = json_tokenizer()
    found = data.draw(changed_fields(json.loads(sound)) if whole else changed(sound))
    content = json.dumps(found).encode() if whole else found
    (folder / "tokenizer.json").write_bytes(content)
    use_tokenizer(folder / "tokenizer.json")


@FUZZ
@given(data=st.data())
def test_tokenizer_configs(folder, data):
    (folder / "beside").mkdir(exist_ok=True)
    (folder / "beside" / "tokenizer.json").write_bytes(json_tokenizer())
    sound = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    config = json.dumps(data.draw(changed_fields(sound)))
    (folder / "beside" / "tokenizer_config.json").write_text(config)
    use_tokenizer(folder / "beside")


# ----- open_source -----


def use_text(path: Path) -> None:
    """Read a file as `make` does with bad rows to skip."""
    source = open_source(str(path))
    with suppress(DataError):
        for row in (row for chunk in source.chunks() for row in chunk()):
            assert row.place.startswith(f"{path}, line ")
            assert bool(row.text) != bool(row.problem)


SOUND = {
    "a.jsonl": JSONL,
    "a.jsonl.gz": gzip.compress(JSONL),
    "a.jsonl.zst": zstd.compress(JSONL),
}


@pytest.mark.parametrize("name", SOUND)
@FUZZ
@given(data=st.data())
def test_rows(folder, name, data):
    (folder / name).write_bytes(data.draw(changed(SOUND[name])))
    use_text(folder / name)
