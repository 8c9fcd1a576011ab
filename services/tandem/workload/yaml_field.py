"""Read typed values from a parsed file; errors name the file and the key of the value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.lane import Lane
from tandem.core.near_name import near_name

Value = TypeVar("Value")
MAX_MERGED_KEYS = 10_000
_WHOLE = "must be a whole number in [{}, {}]"


def refused(place: str, what: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, f"{place}: {what}")


class StrictLoader(yaml.SafeLoader):
    """YAML loader for plain values that refuses a duplicate key, where PyYAML would silently take the second value.

    Loading raises yaml.YAMLError for a key that is written twice in one mapping, and for a mapping that merges (`<<`)
    extend to more than `MAX_MERGED_KEYS` keys; without this limit, nested merges in a file of 1 kB could make billions
    of keys. For a value that cannot be converted to the type that its tag names, such as `!!int ""`, it raises
    yaml.YAMLError, or ValueError where PyYAML does, as for `!!int x`.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (LookupError, AttributeError):
            raise _broken("a value does not fit its tag", node) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise _broken("a key twice in a mapping", node)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        num_own = len(node.value)
        super().flatten_mapping(node)
        if len(node.value) > max(num_own, MAX_MERGED_KEYS):
            raise _broken(f"a mapping with more than {MAX_MERGED_KEYS:,} keys from merges", node)


def _broken(problem: str, node: yaml.Node) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a parsed file, and its place for error messages. The methods check the type of the value and return
    it.

    `file`: file, or file:line. `key`: keys that lead to the value, joined by dots. Methods raise
    TandemError(INVALID_REQUEST) that names both if the value is not of the requested type."""

    file: str
    key: str
    value: Any

    @property
    def place(self) -> str:
        return f"{self.file}: {self.key}" if self.key else self.file

    def refused(self, rule: str) -> TandemError:
        return refused(self.place, f"{rule}, got {self.value!r:.80}")

    def at(self, key: object) -> Field:
        """Return the field under `key` of a mapping; the value must be a mapping that has it."""
        return Field(self.file, f"{self.key}.{key}" if self.key else str(key), self.value[key])

    def fields(self) -> dict[str, Field]:
        """Return the fields of a mapping by key, in its order; the mapping must not be empty."""
        if not isinstance(self.value, Mapping) or not self.value:
            raise self.refused("must be a mapping")
        return {str(key): self.at(key) for key in self.value}

    def record(self, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Field]:
        """Return the fields of a mapping by key.

        The mapping must have all keys in `required`, and no other keys except those in `optional`."""
        found = self.fields()
        unknown = [key for key in found if key not in required + optional]
        if unknown:
            nearest = near_name(unknown[0], required + optional)
            hint = f"did you mean {nearest}? Known are" if nearest else "known are"
            raise refused(self.place, f"{unknown[0]!r} is not known; {hint} {', '.join(required + optional)}")
        missing = [key for key in required if key not in found]
        if missing:
            raise refused(self.place, f"{missing[0]!r} is missing")
        return found

    def number(self) -> float:
        """Return the value as a float; it must be a number from -1e15 to 1e15, where floats hold all whole numbers
        exactly."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not abs(self.value) <= 1e15:
            raise self.refused("must be a number")
        return float(self.value)

    def whole(self, low: int, high: int) -> int:
        """Return the value, which must be an integer in [low, high]."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not low <= self.value <= high:
            raise self.refused(_WHOLE.format(low, high))
        return self.value

    def wholes(self, low: int, high: int) -> tuple[int, ...]:
        """Return the value as a tuple; it must be a list of integers, each in [low, high]."""
        if not isinstance(self.value, list):
            raise self.refused("must be a list")
        for index, value in enumerate(self.value):
            if type(value) is not int or not low <= value <= high:
                raise Field(self.file, f"{self.key}[{index}]", value).refused(_WHOLE.format(low, high))
        return tuple(self.value)

    def lane(self) -> Lane:
        """Return the lane that the value names by its label, such as `interactive`."""
        for lane in Lane:
            if self.value == lane.label:
                return lane
        raise self.refused(f"must be {', '.join(lane.label for lane in Lane)}")

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.refused("must be text")
        return self.value

    def made(self, make: Callable[[], Value]) -> Value:
        """Return the result of `make()`. If `make` raises ValueError, raise a TandemError that names this field's place
        instead."""
        try:
            return make()
        except ValueError as error:
            raise refused(self.place, str(error)) from error
