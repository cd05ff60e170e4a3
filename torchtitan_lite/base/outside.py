"""Code from outside the package that a config names as `module:name`."""

import importlib
import sys
from pathlib import Path
from typing import Any

from .errors import ConfigError


def load_object(key: str, reference: str) -> Any:
    """Import the module of `reference`, such as "my_project.losses:z_loss", and return the object
    of that name. The module is found where Python finds others, last in the working directory.

    Raises ConfigError, which names `key`, such as "[training] loss", if there is none."""
    module, _, name = reference.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: a random.py there must not hide the standard library's
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        fix = f"define {name} in {module}, and start in its folder or add that to PYTHONPATH"
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f'{key} = "{reference}" cannot be loaded ({reason}); {fix}') from error
