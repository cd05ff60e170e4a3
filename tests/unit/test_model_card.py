"""Model cards, with huggingface_hub as the judge of them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st
from sample_exports import save, state_of
from sample_llamas import ARGS, build

from torchtitan_lite.checkpoint.hf_export import export_hf
from torchtitan_lite.checkpoint.manifest import (
    CheckpointManifest,
    TrainingProgress,
    read_manifest,
    write_manifest,
)
from torchtitan_lite.checkpoint.model_card import model_card

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA: dict[str, int | str] = {"seed": 0, "store 1 fingerprint": "0123456789abcdef"}
PROGRESS = TrainingProgress(100, 800, 51200, data=DATA, loss_mean=3.25)
HEAD = {
    "library_name": "transformers",
    "pipeline_tag": "text-generation",
    "tags": ["llama", "torchtitan_lite"],
}
OUTLINE = ["# Llama, pretrained by torchtitan_lite", "```toml", "```", "```toml", "```"]


def card_of(config: dict[str, Any], **fields: Any) -> ModelCard:
    """The card of a run with this config, as the hub's library parses it."""
    values: dict[str, Any] = {"progress": PROGRESS, "versions": {"torch": "2.13.0"}} | fields
    manifest = CheckpointManifest(world_size=1, model={}, config=tomli_w.dumps(config), **values)
    return ModelCard(model_card(manifest, dtype="bfloat16"))


def blocks(card: ModelCard) -> list[dict[str, Any]]:
    """The TOML blocks of a card, as CommonMark finds them: a fence begins and ends a line."""
    return [
        tomli.loads(each) for each in re.findall(r"^```toml\n(.*?)^```$", card.text, re.M | re.S)
    ]


def outline(card: ModelCard) -> list[str]:
    """The lines of a card that begin a heading, a fence, HTML or another YAML block."""
    lines = re.split(r"\r\n|\r|\n", card.text)
    return [line for line in lines if re.match(r" {0,3}(#|```|~~~|<|---)", line)]


# ----- model_card -----


def test_model_card_has_the_run_and_its_config():
    config = {"job": {"description": "a run"}, "float8": {"recipe_name": "rowwise"}}
    card = card_of(config)
    assert card.data.to_dict() == HEAD
    run, shown = blocks(card)
    assert shown == config
    assert run["versions"] == {"torch": "2.13.0"}
    assert run["progress"]["data"] == DATA
    counts = {key: run["progress"][key] for key in ("step", "tokens", "loss_mean")}
    assert counts == {"step": 100, "tokens": 51200, "loss_mean": 3.25}
    assert "Step 100, after 51,200 tokens; exported in bfloat16." in card.text
    assert outline(card) == OUTLINE
    assert "loss_mean" not in blocks(card_of(config, progress=replace(PROGRESS, loss_mean=None)))[0]


HOSTILE = [
    "```\n# owned\n<script>alert(1)</script>\n```toml",
    "---\nlicense: mit\n---",
    "{progress.step} {0} %s",
    "\r```\r# owned\r\n```",
    "</code><img src=x onerror=alert(1)>",
    "\u2028```\u2028# owned\x85```\x0c",
    "'''\n```\n'''",
]


@given(st.sampled_from(HOSTILE) | st.text(alphabet="`~-#<>\n\r\t {}'\"\\[]=a", max_size=40))
def test_text_of_a_checkpoint_stays_in_its_block(text):
    config: dict[str, Any] = {
        "job": {"description": text, text or "key": [text, {"path": text}]},
        text or "table": {},
    }
    data: dict[str, int | str] = {text: text}
    progress = TrainingProgress(1, 1, 1, data=data)
    card = card_of(config, progress=progress, versions={text: text})
    assert card.data.to_dict() == HEAD
    run, shown = blocks(card)
    assert shown == config and run["progress"]["data"] == data and run["versions"] == data
    assert outline(card) == OUTLINE


# A config that someone wrote by hand into a manifest.
def test_a_block_of_lines_in_a_config_is_written_on_one(tmp_path: Path):
    step_dir = save(tmp_path / "step-00000100", state_of(build(ARGS)))
    config = "[job]\ndescription = '''\n```\n# owned\n'''\n"
    write_manifest(step_dir, replace(read_manifest(step_dir), config=config, progress=PROGRESS))
    for dtype in ("keep", "bfloat16"):
        export_hf(step_dir, tmp_path / dtype, dtype=dtype)  # type: ignore[arg-type]
        card = ModelCard.load(tmp_path / dtype / "README.md")
        assert card.data.to_dict() == HEAD
        assert blocks(card)[1] == {"job": {"description": "```\n# owned\n"}}
        assert outline(card) == OUTLINE
        assert f"exported in {'float32' if dtype == 'keep' else dtype}." in card.text
