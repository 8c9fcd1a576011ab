"""Find tool calls in the streamed text of one choice.

The parser reads character by character, so that the result does not depend on how the text was cut into deltas."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from tandem.gateway.output.partial_json import PartialJsonObject
from tandem.gateway.output.text_stream import Delta, ToolCallDelta
from tandem.gateway.output.tool_formats import ToolCallFormat

_BLANKS = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_MAX_NAME_CHARS = 256
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class ToolCallParser:
    """Separate one choice's text into plain text, which `push` and `finish` return, and pieces of tool calls, which
    `take` returns.

    Text that looked like a call is returned as plain text where it breaks `call_format` or names no function of
    `names`. `is_eager`: the first piece of a call is available when its name is known and its arguments begin;
    otherwise a call is available when it is complete. An eager call that has begun stays a call, also where its
    arguments turn out to be malformed. `max_calls`: calls beyond it are dropped. `new_id`: makes the id of a call.
    """

    def __init__(
        self,
        call_format: ToolCallFormat,
        names: Collection[str],
        new_id: Callable[[], str],
        *,
        is_eager: bool,
        max_calls: int | None = None,
    ) -> None:
        self._num_calls = 0
        self._format = call_format
        self._names = names
        self._new_id = new_id
        self._is_eager = is_eager
        self._max_calls = max_calls
        self._pieces: list[ToolCallDelta] = []
        self._text: list[str] = []  # settled, to be returned
        self._raw = ""  # held back: blanks, and a mark or its beginning
        self._body: list[str] = []  # characters of a possible call, behind the mark
        self._state: Callable[[str], None] = self._at_start
        self._call: PartialJsonObject | None = None
        self._name = ""
        self._num_emitted = -1  # characters of the arguments that were emitted; -1: not even the name was

    def split(self, delta: Delta, is_last: bool) -> Delta:
        """Return the delta with the tool calls moved from its text to `tool_calls`; this method is a `DeltaTransform`.

        `is_last`: the delta is the choice's last one, and also gets the text held back.
        """
        text = self.push(delta.text)
        if is_last:
            text += self.finish()
        calls = self.take()
        if text == delta.text and not calls:
            return delta
        return delta._replace(text=text, tool_calls=calls)

    def push(self, text: str) -> str:
        """Add text; return the plain text that is certain not to belong to a call. The rest is held back."""
        if self._state == self._in_text and not self._raw.strip(_BLANKS) and self._format.opening[0] not in text:
            text = self._raw + text
            self._text.append(text.rstrip(_BLANKS))
            self._raw = text[len(self._text[-1]) :]
        else:
            for character in text:
                self._state(character)
            self._emit_arguments()
        return self._settled()

    def finish(self) -> str:
        """End the output; return the plain text that was held back.

        If pieces of an unfinished call were returned before, its remaining text becomes the last piece. An unfinished
        mark after a call is dropped.
        """
        self._emit_arguments()
        if self._num_emitted >= 0:
            self._close_call()
        elif self._state == self._after_call or (self._num_calls and not self._raw.strip(_BLANKS)):
            self._raw = ""
        self._return_as_text()
        return self._settled()

    def take(self) -> tuple[ToolCallDelta, ...]:
        """Return and remove the pieces of calls that were found since the last `take`.

        There is at most one piece for each call, because some clients misread two pieces of one call in one message.
        """
        pieces, self._pieces = tuple(self._pieces), []
        return pieces

    # ---- states: what the next character means

    def _at_start(self, character: str) -> None:
        """Read a character while the text has only blanks."""
        if self._format.is_bare and character == "{":
            self._raw += character
            self._begin_call(character)
        elif character in _BLANKS:
            self._raw += character
        else:
            self._state = self._in_text
            self._in_text(character)

    def _in_text(self, character: str) -> None:
        self._raw += character
        opening = self._format.opening
        if self._raw.endswith(opening):
            self._state = self._before_call
            return
        held = max(size for size in range(len(opening)) if self._raw.endswith(opening[:size]))
        start = len(self._raw[: len(self._raw) - held].rstrip(_BLANKS))
        self._text.append(self._raw[:start])
        self._raw = self._raw[start:]

    def _before_call(self, character: str) -> None:
        """Read a character behind the opening mark, or between two calls."""
        self._raw += character
        is_mistral = self._format.name == "mistral"
        if character == "{":
            self._begin_call(character)
        elif is_mistral and character in _NAME_CHARS:
            self._name = character
            self._state = self._in_name
        elif character not in _BLANKS and not (is_mistral and character == "["):
            self._fail()

    def _in_name(self, character: str) -> None:
        """Read a character of a function name, or of the marks between the name and the brace of its arguments."""
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
        self._emit_eagerly()

    def _in_call(self, character: str) -> None:
        self._body.append(character)
        assert self._call is not None
        self._call.push(character)
        if self._call.failed:
            self._fail()
        elif self._name and self._call.is_value_closed:  # only the arguments of a call that begins with its name
            self._call.push("}")
            self._end_call()
        elif self._call.is_complete:
            self._end_call()
        elif character == "{":
            self._emit_eagerly()

    def _after_call(self, character: str) -> None:
        """Read a character of a separator or closing mark, or the beginning of another call."""
        call_format = self._format
        self._raw += character
        rest = "".join(self._raw.split())
        if call_format.closing and rest == call_format.closing:
            self._raw = ""
            self._state = self._in_text
        elif character == "{" and rest in ("{", ";{", ",{") and call_format.name != "hermes":
            self._begin_call(character)
        elif rest in ("", ";", ","):
            return
        elif call_format.opening.startswith(rest):
            if rest == call_format.opening:
                self._state = self._before_call
        elif not call_format.closing.startswith(rest):
            raw, self._raw = self._raw, ""
            self._state = self._in_text
            for held in raw:
                self._in_text(held)

    # ---- beginning and end of a call

    def _begin_call(self, text: str) -> None:
        self._call = PartialJsonObject()
        for character in text:
            self._call.push(character)
        self._name = ""
        self._num_emitted = -1
        self._state = self._in_call

    def _end_call(self) -> None:
        assert self._call is not None
        if self._num_emitted < 0:
            call = _whole_call(self._call, self._name)
            if call is None or call[0] not in self._names:
                self._fail()
                return
            self._emit_call(call[0], call[1])
        else:
            self._emit_arguments()
        self._close_call()

    def _emit_eagerly(self) -> None:
        """Emit the call where the last brace opened its arguments.

        Called at braces only, so that the pieces do not depend on how the text was cut."""
        call = self._call
        if not self._is_eager or self._num_emitted >= 0 or call is None or call.members[-1:] == []:
            return
        member, name = call.members[-1], self._name or _name(call)
        if member.key in _ARGUMENTS and member.written == ["{"] and name in self._names:
            self._emit_call(name, "")
            self._num_emitted = 0

    def _emit_arguments(self) -> None:
        """Emit what was added to the arguments of the open call since the last time."""
        if self._call is None or self._num_emitted < 0:
            return
        member = next(member for member in self._call.members if member.key in _ARGUMENTS)
        added = "".join(member.written[self._num_emitted :]).rstrip(_BLANKS)
        self._num_emitted += len(added)
        self._add_piece(ToolCallDelta(self._num_calls, added))

    def _emit_call(self, name: str, arguments: str) -> None:
        self._add_piece(ToolCallDelta(self._num_calls, arguments, self._new_id(), name))

    def _add_piece(self, piece: ToolCallDelta) -> None:
        is_over = self._max_calls is not None and piece.index >= self._max_calls
        if not (piece.arguments or piece.id) or is_over:
            return
        if self._pieces and self._pieces[-1].index == piece.index:
            before = self._pieces.pop()
            piece = replace(before, arguments=before.arguments + piece.arguments)
        self._pieces.append(piece)

    def _close_call(self) -> None:
        self._num_calls += 1
        self._num_emitted = -1
        self._drop_call()
        self._state = self._after_call

    def _fail(self) -> None:
        """Stop reading a malformed call: close the call where it was emitted, else return its text as text."""
        if self._num_emitted >= 0:
            self._emit_arguments()
            self._close_call()
        else:
            self._return_as_text()
        self._state = self._in_text

    def _return_as_text(self) -> None:
        self._text += [self._raw, *self._body]
        self._drop_call()

    def _drop_call(self) -> None:
        self._raw = ""
        self._call = None
        self._name = ""
        self._body.clear()

    def _settled(self) -> str:
        text = "".join(self._text)
        self._text.clear()
        return text


def _name(call: PartialJsonObject) -> str:
    for member in call.members:
        if member.key == "name" and member.is_complete:
            return str(_loads(member.text))
    return ""


def _whole_call(call: PartialJsonObject, name: str) -> tuple[str, str] | None:
    """Return the name and the arguments of a complete object; None where the object is no call."""
    name = name or _name(call)
    if not name or _loads(call.text) is None:
        return None
    member = next((member for member in call.members if member.key in _ARGUMENTS), None)
    if member is None:
        return name, "{}"
    arguments = _loads(member.text)
    if isinstance(arguments, str) and isinstance(_loads(arguments), dict):  # some models write the object as a string
        return name, arguments
    return (name, member.text) if isinstance(arguments, dict) else None


def _loads(text: str) -> Any:
    """Return the value of a JSON text; None where it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
