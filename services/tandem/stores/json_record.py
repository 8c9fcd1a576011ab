"""Decode the JSON records of the stores into typed values."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


class _Header(msgspec.Struct):
    schema: int


def decode_record(text: str | bytes, kind: type[T], schema: int) -> T:
    """Decode JSON into a value of type `kind`, ignoring unknown fields.

    `schema`: the number that the record must have in its field `schema`. Raises ValueError where the field has another
    value, or the JSON does not match the type.
    """
    try:
        if msgspec.json.decode(text, type=_Header).schema != schema:
            raise ValueError(f"not a record of schema {schema}")
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
