"""Code from outside the package, which a config names as `module:name`."""

import importlib
import sys
from pathlib import Path
from typing import Any

from .errors import ConfigError


def load_object(key: str, reference: str) -> Any:
    """Return the object that `reference`, such as "my_project.losses:z_loss", names for `key`, such
    as "[training] loss"; the module, if it names one only. Python searches the working directory
    last. Raises ConfigError."""
    name, colon, attribute = reference.partition(":")
    if name not in sys.modules and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last: a random.py there must not hide the standard library's
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise ConfigError(
            f'{key} names module "{name}", which cannot be imported ({type(error).__name__}: '
            f"{error}); start in its folder, or add that to PYTHONPATH"
        ) from error
    if colon and not hasattr(module, attribute):
        raise ConfigError(f'{key} = "{reference}": {name} has no {attribute}; define it there')
    return getattr(module, attribute) if colon else module


def check_outside(key: str, reference: str, fits: bool, rule: str) -> None:
    """Raise ConfigError with the `rule` of what `reference` must be or return unless it `fits`."""
    if not fits:
        raise ConfigError(f'{key} = "{reference}" {rule}; docs/library.md has an example')
