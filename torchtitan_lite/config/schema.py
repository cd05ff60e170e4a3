"""The JSON schema of the TOML files, derived from the sections."""

from typing import Any

from .sections import Config

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The newest draft that TOML editors support."""
BASE = {
    "type": "string",
    "description": "TOML file with the keys that this one does not set, relative to this one.",
}


def config_schema() -> dict[str, Any]:
    """Return the JSON schema of a TOML file. It has this project's names of keys, not
    torchtitan's other ones, which load too."""
    schema = Config.model_json_schema()
    for section in schema["$defs"].values():
        for name, field in section["properties"].items():
            section["properties"][name] = _without_null(field)
    for table in schema["properties"].values():
        del table["default"]  # each key has its own
    schema["properties"] = {"base": BASE} | schema["properties"]
    schema["description"] = "A run of torchtitan_lite"
    return {"$schema": DRAFT} | schema


def _without_null(field: dict[str, Any]) -> dict[str, Any]:
    """Describe a key that may be unset by the type that it has if it is set: TOML has no null."""
    kept = {key: value for key, value in field.items() if key not in ("anyOf", "title")}
    if kept.get("default", ...) is None:
        del kept["default"]
    return kept | field.get("anyOf", [{}])[0]
