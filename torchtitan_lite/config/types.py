"""Types of the values in a config, and what every section has in common."""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Strict,
)
from pydantic_core import CoreSchema, core_schema

from torchtitan_lite.base.paths import check_url, expand_user
from torchtitan_lite.catalog.datasets import DATASETS
from torchtitan_lite.catalog.lr_schedule import DECAYS
from torchtitan_lite.catalog.recipes import RECIPES
from torchtitan_lite.catalog.schedules import SCHEDULES

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
NameOrURL = Annotated[Name, AfterValidator(check_url)]
PathName = Annotated[NameOrURL, AfterValidator(expand_user)]
Names = Annotated[tuple[Name, ...], Strict(False)]
"""A TOML array of strings; kept as a tuple, because a section is frozen."""
OUTSIDE = "module:name"
"""Stands for any object outside the package among the choices of a key."""
REFERENCE = r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$"


@dataclass(frozen=True)
class OneOf:
    """Annotation of a string: one of `names`, or the module and name of an object outside the
    package."""

    names: tuple[str, ...] = ()

    def check(self, value: str) -> str:
        """Return `value`. Raises ValueError if it is neither."""
        if value not in self.names and not re.match(REFERENCE, value):
            raise ValueError(f"must be {', '.join(map(repr, self.names))} or {OUTSIDE}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        outside = {"type": "string", "pattern": REFERENCE}
        named = {"type": "string", "enum": [*self.names]}
        return {"anyOf": [named, outside]} if self.names else outside


DatasetName: TypeAlias = Literal[tuple(DATASETS)]  # type: ignore[valid-type]
TrainingDataset = Annotated[str, OneOf(tuple(DATASETS))]
CROSS_ENTROPY = "cross_entropy"
LossName = Annotated[str, OneOf((CROSS_ENTROPY,))]
DecayType = Annotated[str, OneOf(tuple(DECAYS))]
RecipeName = Annotated[str, OneOf(tuple(RECIPES))]
OptimizerName = Annotated[str, OneOf(("AdamW", "Adam", "Muon"))]
OutsideNames = Annotated[tuple[Annotated[str, OneOf()], ...], Strict(False)]
"""Objects outside the package."""
ScheduleName: TypeAlias = Literal[SCHEDULES]  # type: ignore[valid-type]


class Section(BaseModel):
    """A TOML table. Unknown keys are refused, values are not converted, fields are frozen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
