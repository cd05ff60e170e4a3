"""Types of the values in a config, and what every section has in common."""

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict

from torchtitan_lite.base.errors import ConfigError
from torchtitan_lite.catalog.datasets import DATASETS
from torchtitan_lite.catalog.lr_schedule import DECAYS
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.catalog.schedules import SCHEDULES


def expand_user(path: str, *, what: str = "") -> str:
    """Return `path` with ~ or ~user at its start replaced by that user's home. Raises ConfigError,
    which begins with `what`, if the home is not known."""
    try:
        return str(Path(path).expanduser()) if path.startswith("~") else path
    except RuntimeError as error:
        home = path.partition("/")[0]
        fix = "write the path in full"
        raise ConfigError(f"{what}the folder {home} is not known; {fix}") from error


def refuse_zero_bubble(schedule: object) -> object:
    """Raise ValueError for PyTorch's zero-bubble schedules, see catalog/schedules.py."""
    if isinstance(schedule, str) and schedule.endswith("ZeroBubble"):
        raise ValueError(
            "with zero-bubble schedules PyTorch computes wrong gradients, without an error, under "
            'compile, resharding or recomputation (pytorch/pytorch#161904); use "1F1B"'
        )
    return schedule


MOST = 99_999_999
"""Highest count. The name of a checkpoint's folder has as many digits for the step."""
Count = Annotated[int, Field(ge=1, le=MOST)]
Whole = Annotated[int, Field(ge=0, le=MOST)]
AllOrCount = Annotated[int, Field(ge=-1, le=MOST)]
Dimension = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[float, Field(ge=0, lt=1)]
Peak = Annotated[float, Field(ge=1e-3, le=1e6)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""Strings that the operating system takes."""
Name = Annotated[Text, Field(min_length=1)]
PathOrEmpty = Annotated[Text, AfterValidator(expand_user)]
"""A path, in which ~ is the user's home, or ""."""
PathName = Annotated[Name, AfterValidator(expand_user)]
Names = Annotated[tuple[Name, ...], Strict(False)]
"""A TOML array of strings; kept as a tuple, because a section is frozen."""
DatasetName: TypeAlias = Literal[tuple(DATASETS)]  # type: ignore[valid-type]
DecayType: TypeAlias = Literal[tuple(DECAYS)]  # type: ignore[valid-type]
RecipeName: TypeAlias = Literal[tuple(RECIPES)]  # type: ignore[valid-type]
_Schedule: TypeAlias = Literal[SCHEDULES]  # type: ignore[valid-type]
ScheduleName = Annotated[_Schedule, BeforeValidator(refuse_zero_bubble)]


class Section(BaseModel):
    """A TOML table. Unknown keys are refused, values are not converted, fields are frozen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
