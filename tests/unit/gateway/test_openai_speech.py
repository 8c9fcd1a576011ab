"""Test tools, response formats and reasoning with the openai client, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.events import FinishReason
from tandem.core.grammar import MAX_OPTIONAL_IN_LARK
from tandem.core.request import Request
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.output import json_limits
from tandem.gateway.text.text_model import TextModel
from tests.tokenizer import TEMPLATE
from tests.unit.gateway.openai_replies import CollectedChoice, collected

Front = Any  # the fixtures' class lives in conftest
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
USER_MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
THINKS = TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")


@pytest.fixture(scope="module")
def models(running_front: Front, tokenizer: Tokenizer) -> list[ServedModel]:
    """Return the models: `tiny` has no tool support; `mistral` and `thinker` have markers that are special tokens."""
    served = replace(running_front.dispatch.served[0], max_model_len=8192)
    calling, thinking = _marked(tokenizer, "[TOOL_CALLS]"), _marked(tokenizer, "<think>", "</think>")
    return [
        served,
        replace(served, name="mistral", text=_text(calling, TEMPLATE + "{% if tools %}{% endif %}")),
        replace(served, name="thinker", text=_text(thinking, THINKS)),
    ]


@pytest.fixture(autouse=True)
def served(front: Front, models: list[ServedModel]) -> None:
    front.dispatch.served = models


def _marked(tokenizer: Tokenizer, *marks: str) -> Tokenizer:
    marked = Tokenizer.from_str(tokenizer.to_str())
    marked.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return marked


def _text(tokenizer: Tokenizer, template: str) -> TextModel:
    special = json.dumps({"bos_token_id": 0, "eos_token_ids": [1], "eos_token": "<|im_end|>"})
    source = tokenizer.to_str().encode()
    return TextModel(TokenizerBundle(tokenizer_json=source, chat_template=template, special_tokens_json=special))


def request_chat(
    client: openai.OpenAI, *, stream: bool, model: str = "tiny", messages: Sequence[Any] = USER_MESSAGES, **more: Any
) -> CollectedChoice:
    create: Any = client.chat.completions.create
    (choice,), _, _ = collected(create(model=model, messages=messages, stream=stream, **more), stream)
    return choice


def shown(front: Front) -> str:
    """Return the prompt of the last request as text."""
    request: Request = front.dispatch.requests[-1]
    found: ServedModel = next(model for model in front.dispatch.served if model.name == request.model)
    return found.text.decode(request.prompt_tokens)


def takes(front: Front, text: str) -> bool:
    """Return whether the grammar of the last request accepts all of `text` and its end."""
    request: Request = front.dispatch.requests[-1]
    found: ServedModel = next(model for model in front.dispatch.served if model.name == request.model)
    tokenizer = LLTokenizer(found.text._tokenizer.to_str(), eos_token=[1])
    grammar = request.sampling.grammar
    assert grammar is not None
    written = {
        "json_schema": lambda: LLMatcher.grammar_from_json_schema(grammar.source),
        "regex": lambda: LLMatcher.grammar_from_regex(grammar.source),
        "lark": lambda: LLMatcher.grammar_from_lark(grammar.source),
    }[grammar.kind]()
    matcher = LLMatcher(tokenizer, written)
    tokens = tokenizer.tokenize_str(text, parse_special=True)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call(front: Front, client: openai.OpenAI, stream: bool, choice: Any) -> None:
    front.answer(CALL)
    reply = request_chat(client, stream=stream, tools=TOOLS, tool_choice=choice)
    assert reply.calls == [["weather", '{"city": "Köln"}']]
    assert (reply.text, reply.ended) == ("", "tool_calls")
    assert reply.ids[0].startswith("call_")
    grammar = front.dispatch.requests[-1].sampling.grammar
    if choice == "auto":
        assert grammar is None
    else:
        assert takes(front, CALL)
        assert not takes(front, CALL.replace("city", "town"))
        assert takes(front, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>') == (choice == "required")
        assert takes(front, f"{CALL}\n{CALL}") == (choice == "required")
        assert not takes(front, "Hello.")


@pytest.mark.parametrize("stream", [False, True])
def test_text_and_several_calls(front: Front, client: openai.OpenAI, stream: bool) -> None:
    front.answer(f"Let me look.\n{CALL}\n{CALL}")
    reply = request_chat(client, stream=stream, tools=TOOLS)
    assert reply.text == "Let me look."
    assert reply.calls == [["weather", '{"city": "Köln"}']] * 2
    assert len(set(reply.ids)) == 2
    front.answer(f"{CALL}\n{CALL}")
    assert len(request_chat(client, stream=stream, tools=TOOLS, parallel_tool_calls=False).calls) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_is_no_call_stays_content(front: Front, client: openai.OpenAI, stream: bool) -> None:
    for text in (CALL.replace("weather", "nobody"), "a < b <tool", "No call at all. \n"):
        front.answer(text)
        reply = request_chat(client, stream=stream, tools=TOOLS)
        assert (reply.text, reply.calls, reply.ended) == (text, [], "stop")
    front.answer(CALL)
    assert request_chat(client, stream=stream, tools=TOOLS, tool_choice="none").text == CALL
    front.answer(CALL)
    assert request_chat(client, stream=stream).text == CALL, "without tools marks are text"


@pytest.mark.parametrize("stream", [False, True])
def test_a_truncated_call_has_finish_reason_length(front: Front, client: openai.OpenAI, stream: bool) -> None:
    front.stream(CALL[: CALL.index('": "Köln')], front.finished(FinishReason.LENGTH))
    reply = request_chat(client, stream=stream, tools=TOOLS, tool_choice="required")
    assert reply.calls == [["weather", '{"city']]
    assert reply.ended == "length"


def test_tools_are_described_to_a_template_without_tool_support(front: Front, client: openai.OpenAI) -> None:
    front.answer("ok")
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *USER_MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    request_chat(client, stream=False, messages=messages, tools=TOOLS)
    prompt = shown(front)
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert '{"type": "function", "function": {"name": "now"}}\n</tools>' in prompt
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>" in prompt
    front.answer("ok")
    request_chat(client, stream=False, messages=messages, tools=TOOLS, tool_choice="none")
    assert "# Tools" not in shown(front), "what must not be called is better not known"
    front.answer("ok")
    request_chat(client, stream=False, messages=messages)
    assert "# Tools" not in shown(front)
    assert CALL in shown(front)


@pytest.mark.parametrize("stream", [False, True])
def test_markers_that_are_special_tokens_are_parsed(front: Front, client: openai.OpenAI, stream: bool) -> None:
    text = front.dispatch.served[1].text
    mark = text.special_token("[TOOL_CALLS]")
    front.stream(mark, '[{"name": "weather", "arguments": {"city": "Bonn"}}]', 1, front.finished())
    reply = request_chat(client, stream=stream, model="mistral", tools=TOOLS, tool_choice="required")
    assert reply.calls == [["weather", '{"city": "Bonn"}']]
    assert len(reply.ids[0]) == 9
    assert takes(front, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}]')
    front.stream(mark, "Hello.", 1, front.finished())
    assert request_chat(client, stream=stream, model="mistral").text == "Hello.", "without tools it is hidden as ever"


@pytest.mark.parametrize("stream", [False, True])
def test_thoughts(front: Front, client: openai.OpenAI, stream: bool) -> None:
    """The prompt of this model begins the reasoning."""
    text = front.dispatch.served[2].text
    closing = text.special_token("</think>")
    front.stream("Hm. Köln?\n", closing, "\n\nParis.", 1, front.finished())
    reply = request_chat(client, stream=stream, model="thinker")
    assert (reply.reasoning, reply.text, reply.ended) == ("Hm. Köln?", "Paris.", "stop")
    front.stream("Hm.", closing, CALL, 1, front.finished())
    reply = request_chat(client, stream=stream, model="thinker", tools=TOOLS, tool_choice="required")
    assert (reply.reasoning, reply.text, reply.calls) == ("Hm.", "", [["weather", '{"city": "Köln"}']])
    assert takes(front, f"As I like.</think>\n\n{CALL}")
    front.answer("x")
    request_chat(client, stream=stream, model="thinker", response_format={"type": "json_object"})
    assert takes(front, '{"a</think>{"a": 1}')
    assert not takes(front, '{"a": 1}')
    front.answer("x")
    request_chat(client, stream=stream, model="thinker", extra_body={"guided_choice": ["yes", "no"]})
    assert takes(front, "Hm.</think>yes")
    assert not takes(front, "yes"), "that would be part of the reasoning"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_format(front: Front, client: openai.OpenAI, stream: bool) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    front.answer('{"city": "Köln"}')
    assert json.loads(request_chat(client, stream=stream, response_format=response_format).text) == {"city": "Köln"}
    assert takes(front, '{"city":"Köln"}')
    assert not takes(front, '{"town":"Köln"}')
    front.answer("x")
    request_chat(client, stream=stream, tools=TOOLS, extra_body={"guided_regex": r"[ab]/\/c\n"})
    assert takes(front, "b//c\n")
    assert takes(front, CALL)
    front.answer("x")
    choices = ["yes", "yes, please", "a/b\\c\n", "[x]{2}(y)?", "\u65e5 #1"]
    request_chat(client, stream=stream, tools=TOOLS, extra_body={"guided_choice": choices})
    assert all(takes(front, text) for text in (*choices, CALL))
    assert not takes(front, "yes,")
    front.answer("x")
    request_chat(client, stream=stream, response_format=response_format, tools=TOOLS)
    assert takes(front, '{"city":"Köln"}'), "either an answer in this form"
    assert takes(front, CALL), "or a call"
    assert not takes(front, "x")


def test_a_response_format_ends_despite_ignore_eos(front: Front, client: openai.OpenAI) -> None:
    for body in ({"guided_regex": "[a-z]{3}"}, {"structured_outputs": {"choice": ["yes", "no"]}}):
        front.answer("yes")
        request_chat(client, stream=False, extra_body={**body, "ignore_eos": True}, max_tokens=9)
        sampling = front.dispatch.requests[-1].sampling
        assert (sampling.stop_token_ids, sampling.min_tokens) == ({1}, 9)
        assert takes(front, "yes")
    front.answer("yes")
    client.completions.create(model="tiny", prompt="Well,", extra_body={"guided_choice": ["yes"]})
    assert takes(front, "yes")


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
         "response_format.json_schema.schema"),
        ({"tools": [{"type": "code", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name"),
        ({"tools": [TOOLS[1]] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}],
          "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"tools": TOOLS, "extra_body": {"guided_grammar": 'start: "a"'}}, "tool_choice"),
    ],
)  # fmt: skip
def test_an_invalid_option_is_refused_by_field(front: Front, client: openai.OpenAI, more: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        request_chat(client, stream=False, **more)
    assert caught.value.param == param
    assert front.dispatch.requests == []


@pytest.mark.parametrize("name", ["functions", "function_call"])
def test_deprecated_fields_name_their_replacement(client: openai.OpenAI, name: str) -> None:
    with pytest.raises(openai.BadRequestError, match="use tool"):
        request_chat(client, stream=False, extra_body={name: [{"name": "f"}]})


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_is_parsed_separately(front: Front, client: openai.OpenAI, stream: bool) -> None:
    """A call in one token stream has log probabilities for all of its tokens."""
    front.answer(CALL)
    create: Any = client.chat.completions.create
    answer = create(model="tiny", messages=USER_MESSAGES, tools=TOOLS, logprobs=True, stream=stream)
    (choice,), _, _ = collected(answer, stream)
    assert b"".join(bytes(entry["bytes"]) for entry in choice.scores).decode() == CALL


def test_schemas_of_tools_are_bounded_together_where_a_grammar_is_made_of_them(
    front: Front, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_limits, "_MOST", json_limits._MOST | {"properties": 3})
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": {"properties": {"a": {}, "b": {}}}}}
        for name in "fg"
    ]
    with pytest.raises(openai.BadRequestError, match="at most 3 properties in all tools together, has 4") as caught:
        request_chat(client, stream=False, tools=tools, tool_choice="required")
    assert caught.value.param == "tools[1].function.parameters"
    front.answer("Paris")
    assert request_chat(client, stream=False, tools=tools).text == "Paris"


@pytest.mark.parametrize(
    ("model", "more", "param"),
    [
        ("thinker", {}, "response_format.json_schema.schema"),
        ("tiny", {"tools": TOOLS}, "response_format.json_schema.schema"),
        ("tiny", {"tool_choice": "required"}, "tools[0].function.parameters"),
        ("tiny", {}, None),
    ],
)
def test_objects_within_a_larger_grammar_have_fewer_properties_that_are_not_required(
    front: Front, client: openai.OpenAI, model: str, more: Any, param: str | None
) -> None:
    for num in (MAX_OPTIONAL_IN_LARK, MAX_OPTIONAL_IN_LARK + 1):
        schema = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(num)}}
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body: dict[str, Any] = {"tools": tools} if "tool_choice" in more else {"response_format": response_format}
        front.answer("x")
        if param is None or num == MAX_OPTIONAL_IN_LARK:
            request_chat(client, stream=False, model=model, **body, **more)
        else:
            with pytest.raises(openai.BadRequestError, match=f"at most {MAX_OPTIONAL_IN_LARK} properties") as caught:
                request_chat(client, stream=False, model=model, **body, **more)
            assert caught.value.param == param


@pytest.mark.parametrize("depth", [100, 200, 480, 900])
@pytest.mark.parametrize("field", ["response_format", "tools", "guided_json"])
def test_deep_schemas_are_refused_and_no_failure(front: Front, client: openai.OpenAI, field: str, depth: int) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(depth // 2):
        deep = {"properties": {"a": deep}}
    body: dict[str, Any] = {
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}},
        },
        "tools": {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}],
            "tool_choice": "required",
        },
        "guided_json": {"guided_json": deep},
    }[field]
    front.answer("x")
    if depth == 100:
        request_chat(client, stream=False, extra_body=body)
        return
    with pytest.raises(openai.BadRequestError):
        request_chat(client, stream=False, extra_body=body)
