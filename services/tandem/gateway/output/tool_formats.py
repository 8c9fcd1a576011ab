"""Describe the notations in which model families write tool calls, and select the notation of a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tandem.gateway.text.chat_template import ChatTemplate

ToolParser = Literal["auto", "hermes", "llama3", "mistral", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """Notation in which a model family writes tool calls.

    By default each call is a JSON object with a `name` and the arguments under `arguments_key`.

    - `opening` is the text before the calls, which may be a single special token. With `is_bare`, an answer that begins
      with a JSON object is a call even without this text.
    - `separator` is the text between two calls. `closing` follows each call (Hermes) or, with `is_list`, the list of
      all calls (Mistral).
    - With `names_first` a call is a name, `arguments_mark` and the object of its arguments (Mistral from tokenizer
      version 11 on).
    """

    name: Literal["hermes", "llama3", "mistral"]
    opening: str
    closing: str
    separator: str
    arguments_key: str
    is_bare: bool = False
    is_list: bool = False
    names_first: bool = False
    arguments_mark: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts around calls that may be special tokens: opening, closing and `arguments_mark`. The
        detokenizer must keep these tokens' text for the parser."""
        return tuple(mark for mark in (self.opening, self.closing, self.arguments_mark) if mark and mark != "]")


HERMES = ToolCallFormat(
    name="hermes", opening="<tool_call>", closing="</tool_call>", separator="\n", arguments_key="arguments"
)
LLAMA3 = ToolCallFormat(
    name="llama3", opening="<|python_tag|>", closing="", separator="; ", arguments_key="parameters", is_bare=True
)
MISTRAL = ToolCallFormat(
    name="mistral", opening="[TOOL_CALLS]", closing="]", separator=", ", arguments_key="arguments", is_list=True
)
MISTRAL_V11 = ToolCallFormat(
    name="mistral",
    opening="[TOOL_CALLS]",
    closing="",
    separator="",
    arguments_key="arguments",
    names_first=True,
    arguments_mark="[ARGS]",
)


def select_tool_format(
    parser: ToolParser, template: ChatTemplate, knows: Callable[[str], bool]
) -> ToolCallFormat | None:
    """Return the notation in which a model is expected to write tool calls; None where `parser` is "none".

    A `parser` other than "auto" selects its notation; "auto" derives it from `template`. `knows`: returns whether a
    text is one token of the vocabulary. Hermes' notation is the default: a model whose template has no place for tools
    is prompted to write it (see `output_spec.with_tools`).
    """
    mistral = MISTRAL_V11 if knows("[ARGS]") else MISTRAL
    if parser != "auto":
        return {"none": None, "hermes": HERMES, "llama3": LLAMA3, "mistral": mistral}[parser]
    if not template.takes_tools or HERMES.opening in template.source:
        return HERMES
    if MISTRAL.opening in template.source or knows(MISTRAL.opening):
        return mistral
    if LLAMA3.opening in template.source or knows(LLAMA3.opening):
        return LLAMA3
    return HERMES
