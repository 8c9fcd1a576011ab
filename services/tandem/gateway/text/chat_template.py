"""Render a conversation with the model's own Jinja chat template, in a sandbox."""

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
from tandem.core.errors import invalid_request

_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CUT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Mark at the end of the last message while it is rendered; the one that transformers uses, trailing blank included."""


class GenerationPrompt(Enum):
    """Describe what follows the last message of a conversation in the rendered prompt.

    HEADER: the header of the assistant's answer. CLOSED: nothing. OPEN: nothing, and the end of the last message is cut
    off, so that the answer continues that message."""

    HEADER = "header"
    CLOSED = "closed"
    OPEN = "open"


class _GenerationBlock(Extension):
    """Render `{% generation %}` blocks, which mark training targets in some templates, as their content."""

    tags = {"generation"}  # noqa: RUF012 (declared by the base class)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Render conversations with one Jinja template, which has the functions and filters that transformers gives to
    templates.

    `source`: the template's text; where it is empty or invalid, every `render` raises. `special_tokens`: template
    variables such as `bos_token`. `now_ns`: function that returns the time in nanoseconds since the epoch, which
    `strftime_now` formats in local time."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, now_ns: Callable[[], int] = wall_ns) -> None:
        self.source = source
        self.takes_tools = False
        """Whether the template uses `tools`, and so can also render messages that call tools and messages with their
        results."""
        self._special_tokens = dict(special_tokens)
        self._developer = "developer" in source
        self._defect = "" if source else "the model has no chat template; use /v1/completions"
        try:
            environment = _environment(now_ns)
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            # Plain completions of such a model still work, so only chat requests raise this.
            self._defect = f"the model's chat template does not compile: {error}"

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        ending: GenerationPrompt = GenerationPrompt.HEADER,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text of a conversation. `variables`: the client's `chat_template_kwargs`. `ending`: what
        follows the last message. `tools`: definitions of tools in the form that the template expects; None where there
        are none.

        Raises INVALID_REQUEST where there is no usable template, where the template refuses the messages or fails on
        them, or where `variables` sets a reserved name."""
        if self._defect:
            raise invalid_request(self._defect, "messages")
        for name in variables:
            if name in _RESERVED:
                message = f"chat_template_kwargs must not set {name}, which the server sets"
                raise invalid_request(message, "chat_template_kwargs")
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
            raise invalid_request(f"the chat template refuses these messages: {error.message}", "messages") from error
        except Exception as error:
            # Templates are foreign code and raise anything: adding None to a string is a TypeError.
            raise invalid_request(f"the chat template cannot render these messages: {error}", "messages") from error

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message without fields that are None, as transformers does.

        The role `developer`, OpenAI's later name for `system`, becomes `system` for a template that does not mention
        it."""
        plain = {key: value for key, value in message.items() if value is not None}
        if plain.get("role") == "developer" and not self._developer:
            plain["role"] = "system"
        return plain


def _cut(rendered: str) -> str:
    """Cut the text at the mark, as transformers does.

    A template that trims its messages trims the blank of the mark too; then the blanks before the mark are also cut."""
    end = rendered.rfind(_CUT.strip())
    if end < 0:
        message = "the chat template does not show the end of the final message, so it cannot be continued"
        raise invalid_request(message, "continue_final_message")
    return rendered[:end] if rendered.startswith(_CUT, end) else rendered[:end].rstrip()


def _environment(now_ns: Callable[[], int]) -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(format_string: str) -> str:
        return datetime.fromtimestamp(now_ns() / 1e9).strftime(format_string)

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
    """Serialize a value for a template; unlike Jinja's own filter, without escaping HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
