"""The README.md of an exported model: a model card, as Hugging Face's hub shows it.

Strings from the checkpoint appear only in TOML blocks, each as one quoted line, so that none can
end its block and become Markdown, HTML or YAML."""

from dataclasses import asdict

import tomli_w

from .manifest import CheckpointManifest

CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- llama
- torchtitan_lite
---
# Llama, pretrained by torchtitan_lite

Step {progress.step:,}, after {progress.tokens:,} tokens; exported in {dtype}.
The run, with its data by fingerprint and its loss in nats a token:
```toml
{run}```
Its config, with the recipe in `[float8]`:
```toml
{config}```
"""


def model_card(manifest: CheckpointManifest, *, dtype: str) -> str:
    """Return the model card of a checkpoint that is exported in `dtype`."""
    progress = {key: each for key, each in asdict(manifest.progress).items() if each is not None}
    del progress["schedule_start"]  # always 0: nothing reads it
    run = tomli_w.dumps({"versions": manifest.versions, "progress": progress})
    config = tomli_w.dumps(manifest.tables)
    return CARD.format(progress=manifest.progress, dtype=dtype, run=run, config=config)
