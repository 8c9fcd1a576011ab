"""Collect what a body requests beyond plain text: tools, structured output and reasoning; derive the grammar and the
transforms of its output."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import MAX_OPTIONAL_IN_LARK, Grammar
from tandem.core.request import Request
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, SharedBody
from tandem.gateway.output.json_limits import SchemaLimits
from tandem.gateway.output.reasoning_parser import CLOSING, OPENING, ReasoningParser, ReasoningParserName
from tandem.gateway.output.response_format import StructuredOutput, requested_structured_output, schema_source
from tandem.gateway.output.text_stream import DeltaTransform
from tandem.gateway.output.tool_call_parser import ToolCallParser
from tandem.gateway.output.tool_formats import ToolCallFormat, ToolParser, select_tool_format
from tandem.gateway.output.tool_grammar import answer_grammar, call_rules
from tandem.gateway.output.tools import ToolSet, make_tool_set
from tandem.gateway.text.text_model import TextModel

_GUIDED = ("json", "regex", "choice", "grammar")
_ID_CHARS = string.ascii_letters + string.digits
_TOOLS_BEFORE = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_AFTER = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Hold what one body requests of its output beyond plain text (tools, structured output and reasoning), resolved
    for one model.

    Its methods derive the messages for the chat template, the grammar of the output, and the transforms that split the
    output's text. `text`: the model's tokenizer and template. `form`: the structured output; None for free text.
    `tools`: None where none may be called. `family`: the model's notation of tool calls; None where tool calls in the
    output are not parsed. `may_think`: the output may begin with reasoning. `is_streamed`: the response is streamed.
    The fields are checked, but not yet whether the grammars compile.
    """

    text: TextModel
    form: StructuredOutput | None = None
    tools: ToolSet | None = None
    family: ToolCallFormat | None = None
    may_think: bool = False
    is_streamed: bool = False

    @property
    def shown(self) -> frozenset[int]:
        """Return the ids of the special tokens, such as `<think>`, whose text the detokenizer must keep for the
        transforms."""
        marks: tuple[str, ...] = (OPENING, CLOSING) if self.may_think else ()
        if self.family is not None:
            marks += self.family.marks
        return frozenset(token for mark in marks if (token := self.text.special_token(mark)) is not None)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]]
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Return the messages and the tools to pass to the chat template. For a template that takes no tools, the
        returned messages describe the tools and the second value is None."""
        tools = self.tools.shown if self.tools is not None else ()
        if self.text.template.takes_tools:
            return messages, list(tools) or None
        return with_tools(messages, tools), None

    def grammar(self, prompt: Sequence[int]) -> tuple[Grammar | None, list[StructuredOutput]]:
        """Return the grammar of the output after `prompt` (token ids), and the list of all grammars that must compile.

        The grammar is None for free output. The list begins with the structured output and the schemas of the tools,
        because the grammar of the output is composed of these and an error must name the field at fault. Raises
        UNSUPPORTED for a Lark grammar together with tools, and INVALID_REQUEST for schemas of tools, or in a Lark
        grammar, that exceed SchemaLimits.
        """
        form, calls, parts = self.form, None, [self.form] if self.form is not None else []
        box, family = self.tools, self.family
        if box is not None and family is not None and (box.is_required or form is not None):
            limits = SchemaLimits(" in all tools together", MAX_OPTIONAL_IN_LARK)
            for tool in box.callable_tools:
                limits.add(tool.parameters or {}, box.parameter(tool))
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
            if form is not None and form.grammar.kind == "json_schema":
                schema = json.loads(form.grammar.source)
                schema.pop("x-guidance", None)  # options of the grammar compiler, which are no part of the schema
                SchemaLimits(max_optional=MAX_OPTIONAL_IN_LARK).add(schema, form.param)
            parts.append(StructuredOutput(grammar, "tools" if calls is not None else parts[-1].param))
        return grammar, parts

    def transforms(self, prompt: Sequence[int]) -> list[DeltaTransform]:
        """Return new transforms for the output of one choice after `prompt` (token ids); empty where all output is
        plain text. Each choice needs its own, because transforms hold text back."""
        transforms: list[DeltaTransform] = []
        if self.may_think:
            transforms.append(ReasoningParser(is_open=self._is_thinking(prompt)).split)
        if self.family is not None and self.tools is not None:
            names, max_calls = self.tools.names, self.tools.max_calls
            is_eager = self.is_streamed or self.tools.is_required
            new_id = _mistral_id if self.family.name == "mistral" else _call_id
            transforms.append(ToolCallParser(self.family, names, new_id, is_eager=is_eager, max_calls=max_calls).split)
        return transforms

    def _is_thinking(self, prompt: Sequence[int]) -> bool:
        return self.may_think and self.text.ends_with(prompt, OPENING)


class OutputSpecFactory:
    """Make the OutputSpec of each body, according to the settings `gateway.tool_parser` and
    `gateway.reasoning_parser`."""

    def __init__(self, tool_parser: ToolParser = "auto", reasoning_parser: ReasoningParserName = "auto") -> None:
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser

    def of_chat(self, body: ChatBody, text: TextModel) -> OutputSpec:
        """Return the spec of a chat body for the model `text`. Raises INVALID_REQUEST or UNSUPPORTED, naming the
        field."""
        box = make_tool_set(body.tools, body.tool_choice, body.parallel_tool_calls)
        family = select_tool_format(self._tool_parser, text.template, text.knows) if box is not None else None
        if box is not None and box.is_required and family is None:
            message = (
                "tool_choice requires a tool call, but this gateway does not parse them (gateway.tool_parser=none)"
            )
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
        """Return the spec of a plain completion body for the model `text`, without tools or reasoning. Raises
        INVALID_REQUEST, naming the field."""
        return OutputSpec(text=text, form=_form(body))

    def _may_think(self, text: TextModel) -> bool:
        if self._reasoning_parser != "auto":
            return self._reasoning_parser == "think"
        return OPENING in text.template.source or text.knows(OPENING)


def with_grammar(job: Request, grammar: Grammar | None, text: TextModel) -> Request:
    """Return the request `job` with a grammar that constrains its output; unchanged where `grammar` is None.

    With `ignore_eos`, a grammar still needs an end of sequence to stop. The end-of-sequence tokens of the model `text`
    then become stop tokens, and `min_tokens` forbids them wherever the grammar allows any other token."""
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
    """Make a tool call id of nine letters and digits, the only form that Mistral's templates accept."""
    return "".join(secrets.choice(_ID_CHARS) for _ in range(9))


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` rewritten for a template without tools. The definitions in `tools` are appended to the system
    message with which the conversation begins; without such a message they form a new one before the conversation.
    Calls become text of the assistant, and results become messages of the user.

    The notation is that of Nous Research's Hermes models, which Qwen's templates adopted: signatures within `<tools>`,
    calls within `<tool_call>`, results within `<tool_response>`."""
    conversation = [_without_tool_fields(message) for message in messages]
    if not tools:
        return conversation
    block = _TOOLS_BEFORE + "\n".join(_to_json(tool) for tool in tools) + _TOOLS_AFTER
    if conversation and conversation[0]["role"] in ("system", "developer"):
        first = conversation[0]
        return [{**first, "content": f"{first['content']}\n\n{block}"}, *conversation[1:]]
    return [{"role": "system", "content": block}, *conversation]


def _without_tool_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    call_texts = [f"<tool_call>\n{_to_json(call['function'])}\n</tool_call>" for call in calls]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join([content, *call_texts] if content else call_texts)}


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
