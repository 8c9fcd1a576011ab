"""Follows the text of one JSON object as it comes, and finds the values of its own members; never parses a value."""

from __future__ import annotations

from dataclasses import dataclass, field

_BLANKS = " \t\r\n"


@dataclass(slots=True)
class JsonMember:
    """`written` are the characters of the value, as far as it came."""

    key: str
    written: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        return "".join(self.written).rstrip(_BLANKS)


class PartialJsonObject:
    """Brackets and strings only: what is inside a value is the reader's business, once it is complete. `failed` is for
    what can be no object whatever comes after."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_key", "_place", "_written", "failed", "is_complete", "members")

    def __init__(self) -> None:
        self.members: list[JsonMember] = []
        self.is_complete = False
        self.failed = False
        self._written: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._place = "open"  # open -> key -> colon -> value -> key ...
        self._key = ""

    @property
    def text(self) -> str:
        return "".join(self._written)

    @property
    def is_value_closed(self) -> bool:
        """The bracket or the string that the last member's value began with is closed."""
        has_value = self._place == "value" and bool(self.members[-1].written)
        return has_value and self._depth == 1 and not self._in_string

    def push(self, character: str) -> None:
        """The next character; none after the object is complete or has failed."""
        self._written.append(character)
        if self._in_string:
            self._in_a_string(character)
        elif self._place == "value" and not (self._depth == 1 and character in ",}"):
            self._in_a_value(character)
        elif character not in _BLANKS:
            self._between(character)

    def _in_a_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._place == "key":
                self._place = "colon"
                return
        if self._place == "key":
            self._key += character
        else:
            self.members[-1].written.append(character)

    def _in_a_value(self, character: str) -> None:
        member = self.members[-1]
        if character in _BLANKS and not member.written:
            return
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        self.failed = self._depth < 1
        member.written.append(character)

    def _between(self, character: str) -> None:
        match self._place, character:
            case "open", "{":
                self._depth, self._place = 1, "key"
            case "key", '"':
                self._in_string, self._key = True, ""
            case "key", "}" if not self.members:
                self.is_complete = True
            case "colon", ":":
                self.members.append(JsonMember(self._key))
                self._place = "value"
            case "value", ("," | "}"):
                self.members[-1].is_complete = True
                self._place = "key"
                self.is_complete = character == "}"
            case _:
                self.failed = True
