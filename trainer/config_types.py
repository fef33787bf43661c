"""What the sections of the configuration are made of."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1, lt=2**62)]  # a size: at least 1
CountOrOff = Annotated[int, Field(ge=0, lt=2**62)]  # 0 means "off"
Length = Annotated[int, Field(ge=1, le=10_000_000)]  # in a batch: what a step could ever hold
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Glob = Annotated[str, Field(min_length=1)]
Dtype = Literal["float32", "bfloat16"]


class Table(dict):
    """A table with names of the user's: not changed once it is read, so that a config can be hashed."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
