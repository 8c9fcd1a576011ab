"""Renders a conversation with a model's own Jinja template, sandboxed; never tokenizes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from enum import Enum
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.core.clock import wall_ns
from tandem.core.errors import ErrorKind, TandemError

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the last message while it is rendered; transformers' own mark, blank included."""


class GenerationPrompt(Enum):
    """What follows the last message: the header of the answer, nothing, or not even what closes the message, so that
    the answer goes on with it."""

    HEADER = "header"
    CLOSED = "closed"
    OPEN = "open"


class _GenerationBlock(Extension):
    """`{% generation %}` marks training targets in some templates; rendered as its content."""

    tags = {"generation"}  # noqa: RUF012 (declared by the base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template, with the functions and filters that transformers gives to templates.

    `special_tokens` are its variables such as `bos_token`; `now_ns` is what `strftime_now` shows, in local time.
    """

    __slots__ = ("_defect", "_developer", "_special_tokens", "_template", "source", "takes_tools")

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, now_ns: Callable[[], int] = wall_ns) -> None:
        self.source = source
        self.takes_tools = False
        """It has a place for tools, and so knows messages that call them and that tell their results."""
        self._special_tokens = dict(special_tokens)
        self._developer = "developer" in source
        self._defect = "" if source else "the model has no chat template; use /v1/completions"
        try:
            environment = _environment(now_ns)
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            # Plain completions of such a model still work, so this is told to those who chat.
            self._defect = f"the model's chat template does not compile: {error}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        ending: GenerationPrompt = GenerationPrompt.HEADER,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt. `variables` are the client's own.

        Raises INVALID_REQUEST when the template refuses the messages, or fails over them.
        """
        if self._defect:
            raise TandemError(ErrorKind.INVALID_REQUEST, self._defect, param="messages")
        for name in variables:
            if name in _RESERVED:
                raise TandemError(
                    ErrorKind.INVALID_REQUEST, f"chat_template_kwargs cannot set {name}", param="chat_template_kwargs"
                )
        context = {**self._special_tokens, **variables}
        conversation = [self._message(message) for message in messages]
        if ending is GenerationPrompt.OPEN:
            conversation[-1]["content"] += _CUT
        add_header = ending is GenerationPrompt.HEADER
        rendered = self._rendered(context, messages=conversation, tools=tools, add_generation_prompt=add_header)
        return _cut(rendered) if ending is GenerationPrompt.OPEN else rendered

    def _rendered(self, context: Mapping[str, Any], **variables: Any) -> str:
        try:
            return self._template.render(context, documents=None, **variables)
        except TemplateError as error:
            message = f"the chat template refuses these messages: {error.message}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="messages") from error
        except Exception as error:
            # A template is foreign code: adding None to a string there is a TypeError here.
            message = f"the chat template cannot render these messages: {error}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="messages") from error

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Fields that are None are left out, as transformers does. A template that has never heard of the role
        `developer`, OpenAI's later name for `system`, gets `system`."""
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._developer:
            plain["role"] = "system"
        return plain


def _cut(rendered: str) -> str:
    """As transformers does: a template that trims its messages trims the mark's blank too, and then the blanks before
    the mark go with it."""
    end = rendered.rfind(_CUT.strip())
    if end < 0:
        message = "the chat template does not show the end of the final message, so it cannot be continued"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="continue_final_message")
    return rendered[:end] if rendered.startswith(_CUT, end) else rendered[:end].rstrip()


def _environment(now_ns: Callable[[], int]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.fromtimestamp(now_ns() / 1e9).strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
