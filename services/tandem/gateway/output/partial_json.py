"""Follow the text of one JSON object character by character and collect its top-level members.

Values are not parsed: the caller decodes a member's text once the member is complete."""

from __future__ import annotations

from dataclasses import dataclass, field

_BLANKS = " \t\r\n"


@dataclass(slots=True)
class JsonMember:
    """Hold one top-level member of a JSON object that is still arriving. `written`: the characters of its value so far.
    `is_complete`: the value has been followed by a comma or by the closing brace of the object."""

    key: str
    written: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """Return the JSON text of the value so far."""
        return "".join(self.written).rstrip(_BLANKS)


class PartialJsonObject:
    """Parse one JSON object that arrives character by character, and collect its top-level members.

    `is_complete`: the object's closing brace has arrived. `failed`: the text so far cannot become a JSON object; most
    errors within a value are not noticed, because values are not parsed. `members`: the top-level members in their
    order in the text. A member is added when the colon after its key has arrived, so the last one may have an
    incomplete or empty value.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_key", "_state", "_written", "failed", "is_complete", "members")

    def __init__(self) -> None:
        self.members: list[JsonMember] = []
        self.is_complete = False
        self.failed = False
        self._written: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._state = "open"  # open -> key -> colon -> value -> key ...
        self._key = ""

    @property
    def text(self) -> str:
        """Return all characters added so far."""
        return "".join(self._written)

    @property
    def is_value_closed(self) -> bool:
        """Return whether the last member's value has begun and all its brackets and quotes are closed; False once a
        comma or the object's closing brace has followed the value."""
        has_value = self._state == "value" and bool(self.members[-1].written)
        return has_value and self._depth == 1 and not self._in_string

    def push(self, character: str) -> None:
        """Add the next character. Do not call this once the object is complete or has failed."""
        self._written.append(character)
        if self._in_string:
            self._push_in_string(character)
        elif self._state == "value" and not (self._depth == 1 and character in ",}"):
            self._push_in_value(character)
        elif character not in _BLANKS:
            self._push_between_tokens(character)

    def _push_in_string(self, character: str) -> None:
        is_end = character == '"' and not self._escaped
        self._escaped = character == "\\" and not self._escaped
        self._in_string = not is_end
        if self._state == "value":
            self.members[-1].written.append(character)
        elif is_end:
            self._state = "colon"
        else:
            self._key += character

    def _push_in_value(self, character: str) -> None:
        member = self.members[-1]
        if character in _BLANKS and not member.written:
            return
        self._in_string = character == '"'
        self._depth += (character in "{[") - (character in "}]")
        self.failed = self._depth < 1
        member.written.append(character)

    def _push_between_tokens(self, character: str) -> None:
        match self._state, character:
            case "open", "{":
                self._depth = 1
                self._state = "key"
            case "key", '"':
                self._in_string = True
                self._key = ""
            case "key", "}" if not self.members:
                self.is_complete = True
            case "colon", ":":
                self.members.append(JsonMember(self._key))
                self._state = "value"
            case "value", ("," | "}"):
                self.members[-1].is_complete = True
                self._state = "key"
                self.is_complete = character == "}"
            case _:
                self.failed = True
