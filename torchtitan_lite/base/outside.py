"""Code from outside the package, which a config names as `module:name`."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import ConfigError


def load_module(key: str, name: str) -> ModuleType:
    """Import a module for `key`, such as "[training] loss". Python searches the working directory
    last. Raises ConfigError."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a random.py there must not hide the standard library's
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f'{key} names module "{name}", which cannot be imported ({type(error).__name__}: '
            f"{error}); start in its folder, or add that to PYTHONPATH"
        ) from error


def load_object(key: str, reference: str) -> Any:
    """Return the object that `reference`, such as "my_project.losses:z_loss", names for `key`.
    Raises ConfigError."""
    name, _, attribute = reference.partition(":")
    module = load_module(key, name)
    if not hasattr(module, attribute):
        raise ConfigError(f'{key} = "{reference}": {name} has no {attribute}; define it there')
    return getattr(module, attribute)
