"""The JSON schema of the TOML files, derived from the sections."""

from typing import Any

from .sections import Config

BASE = {
    "type": "string",
    "description": "TOML file with the keys that this one does not set, relative to this one.",
}


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a TOML file, in the newest draft that TOML editors support. It has
    this project's names of keys, not torchtitan's other ones, which load too."""
    schema = Config.model_json_schema()
    schema["properties"] = {"base": BASE} | schema["properties"]
    return {"$schema": "http://json-schema.org/draft-07/schema#"} | schema
