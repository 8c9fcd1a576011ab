"""How one body wants to be answered beyond plain text: tools, form, thoughts; never sends or draws anything."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import Grammar
from tandem.core.request import Request
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, SharedBody
from tandem.gateway.output.output_parser import OutputParser
from tandem.gateway.output.reasoning_parser import CLOSING, OPENING, ReasoningParser, ReasoningParserName
from tandem.gateway.output.response_format import StructuredOutput, requested_structured_output, schema_source
from tandem.gateway.output.tool_call_parser import ToolCallParser
from tandem.gateway.output.tool_formats import ToolCallFormat, ToolParser, select_tool_format
from tandem.gateway.output.tool_grammar import answer_grammar, call_rules
from tandem.gateway.output.tool_prompt import with_tools
from tandem.gateway.output.tools import ToolSet, make_tool_set
from tandem.gateway.text.text_model import TextModel

_GUIDED = ("json", "regex", "choice", "grammar")
_ID_CHARS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Of one body and one model, checked but for whether its grammars compile."""

    text: TextModel
    form: StructuredOutput | None = None
    tools: ToolSet | None = None
    family: ToolCallFormat | None = None
    may_think: bool = False
    is_streamed: bool = False

    @property
    def is_plain(self) -> bool:
        return self.form is None and self.tools is None and not self.may_think

    @property
    def shown(self) -> frozenset[int]:
        """Special tokens whose text the readers of answers need."""
        marks: tuple[str, ...] = (OPENING, CLOSING) if self.may_think else ()
        if self._reads_calls and self.family is not None:
            marks += self.family.marks
        return frozenset(token for mark in marks if (token := self.text.special_token(mark)) is not None)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """What the chat template gets as messages and as tools."""
        tools = self.tools.shown if self.tools is not None else ()
        if self.text.template.takes_tools:
            return messages, list(tools) or None
        return with_tools(messages, tools), None

    def grammar(self, prompt: Sequence[int]) -> tuple[Grammar | None, list[StructuredOutput]]:
        """The grammar of the answer to this prompt, and all that is to be checked before it is used, smaller parts
        first, so that an error names the field that it is in."""
        form, calls, parts = self.form, None, [self.form] if self.form is not None else []
        box, family = self.tools, self.family
        if box is not None and family is not None and box.callable_tools and (box.is_required or form is not None):
            for tool in box.callable_tools:
                source = schema_source(tool.parameters or {}, lenient=not tool.strict)
                parts.append(StructuredOutput(Grammar("json_schema", source), box.parameter(tool)))
            calls = call_rules(box, family, self.text.special_token, is_marked=not box.is_required)
            form = None if box.is_required else form
        grammar = answer_grammar(
            None if form is None else form.grammar,
            calls,
            special=self.text.special_token,
            may_reason=self.may_think,
            is_reasoning=self._is_thinking(prompt),
        )
        if grammar is not None and (form is None or grammar != form.grammar):
            parts.append(StructuredOutput(grammar, "tools" if calls is not None else parts[-1].param))
        return grammar, parts

    def parser(self, prompt: Sequence[int]) -> OutputParser | None:
        """A reader for one choice; None where all of it is text."""
        if not self.may_think and not self._reads_calls:
            return None
        return OutputParser(
            ReasoningParser(is_open=self._is_thinking(prompt)) if self.may_think else None,
            self._calls() if self._reads_calls else None,
        )

    @property
    def _reads_calls(self) -> bool:
        return self.family is not None and self.tools is not None and bool(self.tools.callable_tools)

    def _calls(self) -> ToolCallParser:
        assert self.tools is not None
        assert self.family is not None
        is_eager = self.is_streamed or self.tools.is_required
        new_id = _mistral_id if self.family.name == "mistral" else _call_id
        return ToolCallParser(self.family, self.tools.names, new_id, is_eager=is_eager, max_calls=self.tools.max_calls)

    def _is_thinking(self, prompt: Sequence[int]) -> bool:
        return self.may_think and self.text.ends_with(prompt, OPENING)


class OutputSpecFactory:
    """`tool_parser` and `reasoning_parser` are the gateway's settings of these names."""

    def __init__(self, tool_parser: ToolParser = "auto", reasoning_parser: ReasoningParserName = "auto") -> None:
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def of_chat(self, body: ChatBody, text: TextModel) -> OutputSpec:
        """Raises INVALID_REQUEST or UNSUPPORTED, naming the field."""
        box = make_tool_set(body.tools, body.tool_choice, body.parallel_tool_calls)
        family = select_tool_format(self._tool_parser, text.template, text.knows) if box is not None else None
        if box is not None and box.is_required and family is None:
            message = "tool_choice asks for a call, but this gateway has gateway.tool_parser=none"
            raise TandemError(ErrorKind.UNSUPPORTED, message, param="tool_choice")
        return OutputSpec(
            text=text,
            form=_form(body),
            tools=box,
            family=family,
            may_think=self._may_think(text),
            is_streamed=bool(body.stream),
        )

    def of_completion(self, body: CompletionBody, text: TextModel) -> OutputSpec:
        """Without tools or thoughts. Raises INVALID_REQUEST, naming the field."""
        return OutputSpec(text=text, form=_form(body))

    def _may_think(self, text: TextModel) -> bool:
        if self._reasoning_parser != "auto":
            return self._reasoning_parser == "think"
        return OPENING in text.template.source or text.knows(OPENING)


def with_grammar(job: Request, grammar: Grammar | None, text: TextModel) -> Request:
    """The request with its grammar. What must end by an end of sequence does so even with `ignore_eos`, but then only
    where nothing else may come."""
    if grammar is None:
        return job
    sampling = job.sampling
    if not sampling.stop_token_ids & text.eos_token_ids:
        ends = sampling.stop_token_ids | text.eos_token_ids
        sampling = replace(sampling, stop_token_ids=ends, min_tokens=sampling.max_tokens)
    return replace(job, sampling=replace(sampling, grammar=grammar))


def _form(body: SharedBody) -> StructuredOutput | None:
    guided = {name: getattr(body, f"guided_{name}") for name in _GUIDED}
    return requested_structured_output(body.response_format, body.structured_outputs, guided)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    """Its templates take ids of nine letters and digits only."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))
