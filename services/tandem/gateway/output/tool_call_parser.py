"""Finds tool calls in one choice's text as it comes; never knows where the text is from or where the calls go.

Characters are looked at one by one, so that the calls do not depend on how the text was cut.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from tandem.gateway.output.partial_json import JsonMember, PartialJsonObject
from tandem.gateway.output.text_stream import ToolCallDelta
from tandem.gateway.output.tool_formats import ToolCallFormat

_BLANKS = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_MAX_NAME_CHARS = 256
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class ToolCallParser:
    """`push` and `finish` return the text that is no call; `take` the pieces of calls since it was last asked, at most
    one of each: some clients take two pieces in one message for two calls.

    A call is told of as soon as its name is known and its arguments begin, if `is_eager`; else when it is complete.
    What looked like a call and is none, because it is not what its family writes or names none of `names`, is text;
    but an eager call that was told of stays one, whatever its arguments turn out to be. With `max_calls` further ones
    are dropped. `new_id` makes the id of a call.
    """

    __slots__ = (
        "_body",
        "_call",
        "_family",
        "_is_eager",
        "_max_calls",
        "_name",
        "_names",
        "_new_id",
        "_num_told",
        "_pieces",
        "_raw",
        "_state",
        "_text",
        "num_calls",
    )

    def __init__(
        self,
        family: ToolCallFormat,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        is_eager: bool,
        max_calls: int | None = None,
    ) -> None:
        self.num_calls = 0
        self._family = family
        self._names = names
        self._new_id = new_id
        self._is_eager = is_eager
        self._max_calls = max_calls
        self._pieces: list[ToolCallDelta] = []
        self._text: list[str] = []  # settled, to be returned
        self._raw = ""  # held back: blanks and a mark or its beginning
        self._body: list[str] = []  # characters of what may become a call, behind the mark
        self._state: Callable[[str], None] = self._at_start
        self._call: PartialJsonObject | None = None
        self._name = ""
        self._num_told = -1  # characters of the arguments that were told of; -1: not even the name

    def push(self, text: str) -> str:
        if self._state == self._in_text and not self._raw.strip(_BLANKS) and self._family.opening[0] not in text:
            text = self._raw + text
            self._text.append(text.rstrip(_BLANKS))
            self._raw = text[len(self._text[-1]) :]
        else:
            for character in text:
                self._state(character)
            self._tell()
        return self._settled()

    def finish(self) -> str:
        """No more text will come. What is left of a call that was told of is its last piece, and a mark behind a call
        that was cut off is nothing; else it is text."""
        self._tell()
        if self._num_told >= 0:
            self._close_call()
        elif self._state == self._after_call or (self.num_calls and not self._raw.strip(_BLANKS)):
            self._raw = ""
        self._give_up()
        return self._settled()

    def take(self) -> tuple[ToolCallDelta, ...]:
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    # ---- states: what the next character means

    def _at_start(self, character: str) -> None:
        """Only blanks have come."""
        if self._family.is_bare and character == "{":
            self._raw += character
            self._begin_call(character)
        elif character in _BLANKS:
            self._raw += character
        else:
            self._state = self._in_text
            self._in_text(character)

    def _in_text(self, character: str) -> None:
        self._raw += character
        opening = self._family.opening
        if self._raw.endswith(opening):
            self._state = self._before_call
            return
        held = max(size for size in range(len(opening)) if self._raw.endswith(opening[:size]))
        start = len(self._raw[: len(self._raw) - held].rstrip(_BLANKS))
        self._text.append(self._raw[:start])
        self._raw = self._raw[start:]

    def _before_call(self, character: str) -> None:
        """Behind the opening, or between two calls."""
        self._raw += character
        is_mistral = self._family.name == "mistral"
        if character == "{":
            self._begin_call(character)
        elif is_mistral and character in _NAME_CHARS:
            self._name = character
            self._state = self._in_name
        elif character not in _BLANKS and not (is_mistral and character == "["):
            self._fail()

    def _in_name(self, character: str) -> None:
        """A name, and the marks behind it, up to the brace of its arguments."""
        self._raw += character
        if character != "{":
            self._name += character
            if len(self._name) > _MAX_NAME_CHARS:
                self._fail()
            return
        name = self._name.partition("[")[0].strip(_BLANKS)
        if name not in self._names:
            self._fail()
            return
        self._begin_call('{"arguments":{')
        self._name = name
        self._state = self._in_named_arguments
        self._begin_telling()

    def _in_named_arguments(self, character: str) -> None:
        self._body.append(character)
        assert self._call is not None
        self._call.push(character)
        if self._call.failed:
            self._fail()
        elif self._call.is_value_closed:
            self._call.push("}")
            self._end_call()

    def _in_call(self, character: str) -> None:
        self._body.append(character)
        assert self._call is not None
        self._call.push(character)
        if self._call.failed:
            self._fail()
        elif self._call.is_complete:
            self._end_call()
        elif character == "{":
            self._begin_telling()

    def _after_call(self, character: str) -> None:
        """Separators and the closing mark, or another call."""
        family = self._family
        self._raw += character
        rest = "".join(self._raw.split())
        if family.closing and rest == family.closing:
            self._raw = ""
            self._state = self._in_text
        elif character == "{" and rest in ("{", ";{", ",{") and family.name != "hermes":
            self._begin_call(character)
        elif rest in ("", ";", ","):
            return
        elif family.opening.startswith(rest):
            if rest == family.opening:
                self._state = self._before_call
        elif not family.closing.startswith(rest):
            raw, self._raw = self._raw, ""
            self._state = self._in_text
            for each in raw:
                self._in_text(each)

    # ---- what becomes of a call

    def _begin_call(self, text: str) -> None:
        self._call = PartialJsonObject()
        for character in text:
            self._call.push(character)
        self._name = ""
        self._num_told = -1
        self._state = self._in_call

    def _end_call(self) -> None:
        assert self._call is not None
        if self._num_told < 0:
            call = _whole_call(self._call, self._name)
            if call is None or call[0] not in self._names:
                self._fail()
                return
            self._announce(call[0], call[1])
        else:
            self._tell()
        self._close_call()

    def _begin_telling(self) -> None:
        """Where a brace may have opened the arguments: at no other character, so that cuts make no difference."""
        call = self._call
        if not self._is_eager or self._num_told >= 0 or call is None or call.members[-1:] == []:
            return
        member, name = call.members[-1], self._name or _name(call)
        if member.key in _ARGUMENTS and member.written == ["{"] and name in self._names:
            self._announce(name, "")
            self._num_told = 0

    def _tell(self) -> None:
        """What came of the arguments since this was asked last."""
        if self._call is None or self._num_told < 0:
            return
        member = next(member for member in self._call.members if member.key in _ARGUMENTS)
        fresh = "".join(member.written[self._num_told :]).rstrip(_BLANKS)
        self._num_told += len(fresh)
        self._add(ToolCallDelta(self.num_calls, fresh))

    def _announce(self, name: str, arguments: str) -> None:
        self._add(ToolCallDelta(self.num_calls, arguments, self._new_id(), name))

    def _add(self, piece: ToolCallDelta) -> None:
        is_over = self._max_calls is not None and piece.index >= self._max_calls
        if not (piece.arguments or piece.id) or is_over:
            return
        if self._pieces and self._pieces[-1].index == piece.index:
            before = self._pieces.pop()
            piece = replace(before, arguments=before.arguments + piece.arguments)
        self._pieces.append(piece)

    def _close_call(self) -> None:
        self.num_calls += 1
        self._call, self._name, self._num_told, self._raw = None, "", -1, ""
        self._body.clear()
        self._state = self._after_call

    def _fail(self) -> None:
        """What came since the mark is no call."""
        if self._num_told >= 0:
            self._tell()
            self._close_call()
            self._state = self._in_text
            return
        self._give_up()
        self._state = self._in_text

    def _give_up(self) -> None:
        self._text += [self._raw, *self._body]
        self._raw, self._call, self._name = "", None, ""
        self._body.clear()

    def _settled(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


def _name(call: PartialJsonObject) -> str:
    for member in call.members:
        if member.key == "name" and member.is_complete:
            return str(_value(member))
    return ""


def _whole_call(call: PartialJsonObject, name: str) -> tuple[str, str] | None:
    """Name and arguments of a complete object; None where it is no call."""
    name = name or _name(call)
    if not name or _loads(call.text) is None:
        return None
    member = next((member for member in call.members if member.key in _ARGUMENTS), None)
    if member is None:
        return name, "{}"
    arguments = _value(member)
    if isinstance(arguments, str) and _is_object(arguments):  # JSON within a string, as some models do
        return name, arguments
    return (name, member.text) if isinstance(arguments, dict) else None


def _value(member: JsonMember) -> Any:
    return _loads(member.text)


def _is_object(text: str) -> bool:
    return isinstance(_loads(text), dict)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
