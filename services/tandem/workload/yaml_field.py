"""Read typed values from a parsed file, with errors that name where a value is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane

Value = TypeVar("Value")
_WHOLE = "must be a whole number in [{}, {}]"


def refused(place: str, what: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"{place}: {what}")


class StrictLoader(yaml.SafeLoader):
    """Load plain YAML values and refuse duplicate keys, of which YAML would silently take the second."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise yaml.constructor.ConstructorError(problem="a key twice in a mapping", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Field:
    """A value in `file` (or file:line) under `key`. Every method raises TandemError(INVALID_REQUEST) that names both
    where the value is not of the requested kind."""

    file: str
    key: str
    value: Any

    @property
    def place(self) -> str:
        return f"{self.file}: {self.key}" if self.key else self.file

    def refused(self, rule: str) -> TandemError:
        return refused(self.place, f"{rule}, got {self.value!r:.80}")

    def at(self, key: object) -> Field:
        """Return the value under `key` of a mapping that has it."""
        return Field(self.file, f"{self.key}.{key}" if self.key else str(key), self.value[key])

    def fields(self) -> dict[str, Field]:
        """Return the fields of a mapping that is not empty, in its order."""
        if not isinstance(self.value, Mapping) or not self.value:
            raise self.refused("must be a mapping")
        return {str(key): self.at(key) for key in self.value}

    def record(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Field]:
        """Return the fields of a mapping that has all of `required` and nothing else except `optional`."""
        found = self.fields()
        unknown = [key for key in found if key not in required + optional]
        if unknown:
            raise refused(self.place, f"{unknown[0]!r} is not known, only {', '.join(required + optional)}")
        missing = [key for key in required if key not in found]
        if missing:
            raise refused(self.place, f"{missing[0]!r} is missing")
        return found

    def number(self) -> float:
        """Return a finite number, small enough to be exact in microseconds."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not abs(self.value) <= 1e15:
            raise self.refused("must be a number")
        return float(self.value)

    def whole(self, low: int, high: int) -> int:
        """Return an integer in [low, high]."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not low <= self.value <= high:
            raise self.refused(_WHOLE.format(low, high))
        return self.value

    def wholes(self, low: int, high: int) -> tuple[int, ...]:
        """Return a list of integers, each in [low, high]."""
        if not isinstance(self.value, list):
            raise self.refused("must be a list")
        for index, value in enumerate(self.value):
            if type(value) is not int or not low <= value <= high:
                raise Field(self.file, f"{self.key}[{index}]", value).refused(_WHOLE.format(low, high))
        return tuple(self.value)

    def lane(self) -> Lane:
        """Return the lane with this label."""
        for lane in Lane:
            if self.value == lane.label:
                return lane
        raise self.refused(f"must be {', '.join(lane.label for lane in Lane)}")

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.refused("must be text")
        return self.value

    def made(self, make: Callable[[], Value]) -> Value:
        """Return `make()`; turns a ValueError into an error that names the place."""
        try:
            return make()
        except ValueError as error:
            raise refused(self.place, str(error)) from error
