"""What a column of the training batch is, and how an attribute of a sample is declared as one."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, Self, overload

import numpy as np

from miles.utils.array_list import ArrayList, as_array


@dataclass(frozen=True)
class Column:
    """One column of the training batch. All that is done with its values follows from this.

    Args:
        name: the column's name, as Miles calls it.
        dtype: numpy's type of its numbers.
        per: what has one entry: a "token" (prompt and response), a "response_token", or a "sample".
        attribute: of `Sample`, where its entries come from; None: Miles makes them.
        dims: names of the dimensions of one entry; none where an entry is a number.
        required: whether every batch has it.
    """

    name: str
    dtype: type[np.generic]
    per: Literal["token", "response_token", "sample"]
    attribute: str | None = None
    dims: tuple[str, ...] = ()
    required: bool = False


class ArrayField[Value: ArrayList | None]:
    """Declares an attribute of `Sample`: an `ArrayList`, made of what is set; or None, unless it is `required`.

    Args:
        dtype, per, dims, required: as in `Column`.
        column: name of the column; None: the attribute's.
    """

    def __init__(
        self,
        dtype: type[np.generic],
        per: Literal["token", "response_token"],
        *,
        dims: tuple[str, ...] = (),
        required: bool = False,
        column: str | None = None,
    ) -> None:
        self.column = Column(column or "", dtype, per, None, dims, required)

    def __set_name__(self, owner: type, name: str) -> None:
        self.column = dataclasses.replace(self.column, name=self.column.name or name, attribute=name)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...
    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:  # a dataclass asks for the default
            return () if self.column.required else None
        return instance.__dict__[self.column.attribute]

    def __set__(self, instance: Any, values: Any) -> None:
        column = self.column
        if values is not None or column.required:
            what = f"sample {vars(instance).get('index')}: {column.attribute}"
            array = as_array(values, what, column.dtype, column.dims)
            # A list that is set is the list that is read.
            values = values if type(values) is ArrayList and values.array is array else ArrayList(array)
        instance.__dict__[column.attribute] = values


def columns_of(owner: type) -> dict[str, Column]:
    """The columns that `Sample` or a class derived from it declares, by attribute, in their order."""
    fields = {name: field for parent in reversed(owner.__mro__) for name, field in vars(parent).items()}
    return {name: field.column for name, field in fields.items() if isinstance(field, ArrayField)}
