"""What the sections of the configuration have in common."""

import types
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo

from miles.utils.errors import UserError

FieldKind = Literal["bool", "list", "dict", "scalar"]


def base_type(annotation: Any) -> Any:
    """The type of a field without its `None` alternative: `int | None` gives `int`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (only,) = [option for option in get_args(annotation) if option is not type(None)]
        return only
    return annotation


def field_kind(field: FieldInfo) -> FieldKind:
    """How a field's value is written: a switch, one value, several values, or a JSON object."""
    kind = base_type(field.annotation)
    if kind is bool:
        return "bool"
    return {list: "list", dict: "dict"}.get(get_origin(kind) or kind, "scalar")


class Section(BaseModel):
    """Base of every section: frozen, and closed to names it does not declare."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)
    title: ClassVar[str]

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and base_type(cls.model_fields[info.field_name].annotation) in (int, float):
            raise UserError("a number is needed here, not true or false")
        return value
