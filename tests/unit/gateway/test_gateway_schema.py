"""Test which fields the front end accepts, which it refuses by name, and what request the accepted ones make."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.grammar import MAX_OBJECTS, Grammar
from tandem.core.request import Request
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.openai.output_spec import OutputSpec
from tandem.gateway.openai.prompt import encode, given_prompts
from tandem.gateway.openai.request_params import (
    chat_ending,
    chat_params,
    completion_params,
    conversation,
    new_id,
    request,
)
from tandem.gateway.openai.request_schema import ChatBody, CompletionBody, parse
from tandem.gateway.output.response_format import StructuredOutput, schema_source
from tandem.gateway.text.text_model import TextModel

USER = {"role": "user", "content": "hi"}
CALLER = RequestContext(request_id="r", received_at=0.0)
INVALID, UNSUPPORTED = ErrorKind.INVALID_REQUEST, ErrorKind.UNSUPPORTED


@pytest.fixture
def served(make_text: Callable[..., TextModel]) -> ServedModel:
    text = make_text(config={"temperature": 0.6, "top_k": 20})
    return ServedModel(name="tiny", max_model_len=100, text=text, created=0)


def chat_body(**fields: Any) -> ChatBody:
    return parse(json.dumps({"model": "tiny", "messages": [USER]} | fields).encode(), ChatBody)


def chat(served: ServedModel, **fields: Any) -> Request:
    body = chat_body(**fields)
    params = chat_params(body)
    ending = chat_ending(body.messages, body.add_generation_prompt, body.continue_final_message)
    prompt = served.text.encode_chat(conversation(body.messages), body.chat_template_kwargs, ending=ending)
    return request(params, served, prompt, new_id("chatcmpl-"), CALLER)


def complete(served: ServedModel, **fields: Any) -> Request:
    body = parse(json.dumps({"model": "tiny", "prompt": "hi"} | fields).encode(), CompletionBody)
    params = completion_params(body)
    (given,) = given_prompts(body.prompt, served.text.vocab_size, served.max_model_len)
    add = body.add_special_tokens is not False
    prompt = encode(given, served.text, served.max_model_len, add_special_tokens=add, with_offsets=False)
    return request(params, served, prompt.ids, new_id("cmpl-"), CALLER)


@pytest.mark.parametrize(
    ("field", "value", "kind", "param"),
    [
        ("messages", [], INVALID, "messages"),
        ("messages", "hi", INVALID, "messages"),
        ("messages", [{"content": "x"}], INVALID, "messages[0].role"),
        ("messages", [USER, {"role": "user", "content": 5}], INVALID, "messages[1].content"),
        ("messages", [{"role": "user"}], INVALID, "messages[0].content"),
        ("messages", [{"role": "wizard", "content": "x"}], INVALID, "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], INVALID, "messages[0].content[0].text"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            UNSUPPORTED,
            "messages[0].content[0]",
        ),
        (
            "messages",
            [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
            INVALID,
            "messages[0].tool_calls[0].function",
        ),
        (
            "messages",
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            INVALID,
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("model", 5, INVALID, "model"),
        ("model", None, INVALID, "model"),
        ("n", 0, INVALID, "n"),
        ("n", -1, INVALID, "n"),
        ("n", 129, INVALID, "n"),
        ("n", "1", INVALID, "n"),
        ("max_tokens", 0, INVALID, "max_tokens"),
        ("max_completion_tokens", -5, INVALID, "max_completion_tokens"),
        ("max_tokens", 1.5, INVALID, "max_tokens"),
        ("max_tokens", 10**30, ErrorKind.CONTEXT_LENGTH, "messages"),
        ("temperature", "hot", INVALID, "temperature"),
        ("temperature", 3, INVALID, "temperature"),
        ("temperature", True, INVALID, "temperature"),
        ("top_p", 0, INVALID, "top_p"),
        ("top_k", -2, INVALID, "top_k"),
        ("min_p", 2, INVALID, "min_p"),
        ("seed", 2**64, INVALID, "seed"),
        ("seed", -(2**63) - 1, INVALID, "seed"),
        ("stop", "", INVALID, "stop"),
        ("stop", ["x"] * 17, INVALID, "stop"),
        ("stop", ["x" * 513], INVALID, "stop"),
        ("stop", [1], INVALID, "stop[0]"),
        ("stream", "yes", INVALID, "stream"),
        ("stream_options", {"include_usage": True}, INVALID, "stream_options"),
        ("top_logprobs", 3, INVALID, "top_logprobs"),
        ("logprobs", 3, INVALID, "logprobs"),
        ("tools", [{"type": "function"}], INVALID, "tools[0].function"),
        ("tool_choice", "some", INVALID, "tool_choice"),
        ("functions", [{"name": "f"}], UNSUPPORTED, "functions"),
        ("response_format", {"type": "xml"}, INVALID, "response_format.type"),
        ("logit_bias", {"5": 101}, INVALID, "logit_bias.5"),
        ("logit_bias", {"05": 1}, INVALID, "logit_bias.05"),
        ("logit_bias", {"-1": 1}, INVALID, "logit_bias.-1"),
        ("logit_bias", {"hi": 1}, INVALID, "logit_bias.hi"),
        ("logit_bias", {"420": 1}, INVALID, "logit_bias.420"),
        ("logit_bias", {"9" * 5000: 1}, INVALID, "logit_bias." + "9" * 5000),
        ("logit_bias", {"5": "much"}, INVALID, "logit_bias[...]"),
        ("logit_bias", [1], INVALID, "logit_bias"),
        ("logit_bias", {str(token): 1 for token in range(5000)}, INVALID, "logit_bias"),
        ("stop_token_ids", [5] * 5000, INVALID, "stop_token_ids"),
        ("presence_penalty", 2.1, INVALID, "presence_penalty"),
        ("frequency_penalty", -3, INVALID, "frequency_penalty"),
        ("repetition_penalty", 0, INVALID, "repetition_penalty"),
        ("min_tokens", -1, INVALID, "min_tokens"),
        ("min_tokens", 10**30, INVALID, "min_tokens"),
        ("stop_token_ids", [420], INVALID, "stop_token_ids"),
        ("stop_token_ids", ["x"], INVALID, "stop_token_ids[0]"),
        ("priority", 2**40, INVALID, "priority"),
        ("service_tier", "gold", INVALID, "service_tier"),
        ("cache_salt", "", INVALID, "cache_salt"),
        ("disaggregation", "sometimes", INVALID, "disaggregation"),
        ("cache_control", {"type": "eternal"}, INVALID, "cache_control.type"),
        ("cache_control", {"type": "ephemeral", "ttl": "soon"}, INVALID, "cache_control.ttl"),
        ("cache_control", {"type": "ephemeral", "ttl": "25h"}, INVALID, "cache_control.ttl"),
        ("cache_control", {"type": "ephemeral", "ttl": 0}, INVALID, "cache_control.ttl"),
        ("cache_control", {"type": "ephemeral", "ttl": "nans"}, INVALID, "cache_control.ttl"),
        ("prompt_cache_retention", "1h", INVALID, "prompt_cache_retention"),
        ("cache_salt", "x" * 257, INVALID, "cache_salt"),
        ("prompt_logprobs", 21, INVALID, "prompt_logprobs"),
        ("user", 5, INVALID, "user"),
        ("echo", True, UNSUPPORTED, "echo"),
        ("documents", [{"text": "x"}], UNSUPPORTED, "documents"),
        ("modalities", ["text", "audio"], UNSUPPORTED, "modalities"),
        ("audio", {"voice": "x"}, UNSUPPORTED, "audio"),
        ("reasoning_effort", "low", UNSUPPORTED, "reasoning_effort"),
        ("best_of", 2, UNSUPPORTED, "best_of"),
        ("chat_template", "{{ messages }}", UNSUPPORTED, "chat_template"),
        ("include_reasoning", False, UNSUPPORTED, "include_reasoning"),
        ("return_tokens_as_token_ids", True, UNSUPPORTED, "return_tokens_as_token_ids"),
        ("thinking_token_budget", 100, UNSUPPORTED, "thinking_token_budget"),
        ("chat_template_kwargs", {"messages": []}, INVALID, "chat_template_kwargs"),
    ],
)
def test_a_chat_is_refused_by_field(served: ServedModel, field: str, value: Any, kind: ErrorKind, param: str) -> None:
    with pytest.raises(TandemError) as caught:
        chat(served, **{field: value})
    assert (caught.value.kind, caught.value.param) == (kind, param)
    assert param.split(".")[-1].split("[")[0] in caught.value.message or kind is ErrorKind.CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("field", "value", "kind", "param"),
    [
        ("prompt", [], INVALID, "prompt"),
        ("prompt", ["a", [1]], INVALID, "prompt"),
        ("prompt", ["a"] * 257, INVALID, "prompt"),
        ("max_tokens", -1, INVALID, "max_tokens"),
        ("prompt", [1, "a"], INVALID, "prompt"),
        ("prompt", [[]], INVALID, "prompt"),
        ("prompt", [-1], INVALID, "prompt"),
        ("prompt", [[5, 10**6]], INVALID, "prompt"),
        ("prompt", [2**70], INVALID, "prompt"),
        ("prompt", [1.5], INVALID, "prompt[0]"),
        ("prompt", {"a": 1}, INVALID, "prompt"),
        ("prompt", None, INVALID, "prompt"),
        ("prompt", [5] * 100, ErrorKind.CONTEXT_LENGTH, "prompt"),
        ("echo", 1, INVALID, "echo"),
        ("best_of", 2, UNSUPPORTED, "best_of"),
        ("suffix", "x", UNSUPPORTED, "suffix"),
        ("prompt_embeds", "eA==", UNSUPPORTED, "prompt_embeds"),
        ("logprobs", 21, INVALID, "logprobs"),
        ("logprobs", True, INVALID, "logprobs"),
    ],
)
def test_a_completion_is_refused_by_field(
    served: ServedModel, field: str, value: Any, kind: ErrorKind, param: str
) -> None:
    with pytest.raises(TandemError) as caught:
        complete(served, **{field: value})
    assert (caught.value.kind, caught.value.param) == (kind, param)


def test_no_op_fields_and_unknown_fields_are_accepted(served: ServedModel) -> None:
    off = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "presence_penalty": 0.0,
        "frequency_penalty": None,
        "echo": False,
        "modalities": ["text"],
        "include_reasoning": True,
        "user": "somebody",
        "metadata": {"a": "b"},
        "never_heard_of": [1],
        "top_p": None,
        "n": 1,
    }
    assert chat(served, **off).sampling.top_p == 1.0
    assert complete(served, echo=False, best_of=1, suffix=None, include_reasoning=False).prompt_tokens[0] == 0


def test_message_parts_are_joined_and_absent_fields_left_out() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat_body(messages=[{"role": "user", "content": parts, "name": None}])
    assert conversation(body.messages) == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_an_assistant_message_may_have_no_content(name: str) -> None:
    """The assistant may have reasoned, refused, or called tools: clients return its messages as they got them."""
    message = {"role": "assistant", "content": None, name: "hm", "refusal": "no"}
    body = chat_body(messages=[message])
    assert conversation(body.messages) == [{"role": "assistant", "content": "", "reasoning_content": "hm"}]


def test_zero_top_logprobs_need_no_logprobs() -> None:
    assert chat_params(chat_body(logprobs=False, top_logprobs=0)).logprobs is None


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_token_prompts_are_taken_as_they_are(served: ServedModel, prompt: Any) -> None:
    assert complete(served, prompt=prompt).prompt_tokens == (5, 6, 7)


def test_one_text_in_a_list(served: ServedModel) -> None:
    assert complete(served, prompt=["hi"]).prompt_tokens == complete(served).prompt_tokens


def test_defaults_are_the_models(served: ServedModel) -> None:
    sampling = chat(served).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 1.0, 20, 0.0)
    assert sampling.max_tokens == 100 - len(chat(served).prompt_tokens)
    assert sampling.stop_token_ids == {1}
    assert sampling.logprobs is None


def test_a_request_overrides_them(served: ServedModel) -> None:
    fields = {"temperature": 0, "top_k": -1, "max_tokens": 9, "max_completion_tokens": 4, "ignore_eos": True}
    sampling = chat(served, **fields, seed=-1, logprobs=True).sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.0, 0, 4)
    assert sampling.stop_token_ids == frozenset()
    assert sampling.seed == 2**64 - 1
    assert sampling.logprobs == 0
    assert complete(served, logprobs=5).sampling.logprobs == 5


def test_seeds_and_ids_differ_where_none_is_given(served: ServedModel) -> None:
    requests = [chat(served) for _ in range(8)]
    assert len({each.sampling.seed for each in requests}) == 8
    assert len({each.id for each in requests}) == 8
    assert all(each.id.startswith("chatcmpl-") for each in requests)


def test_the_context_length_names_both_numbers(served: ServedModel) -> None:
    assert complete(served, prompt=[5] * 90, max_tokens=10).sampling.max_tokens == 10
    with pytest.raises(TandemError, match=r"100 tokens, but 101 .* 90 of prompt and 11 of output"):
        complete(served, prompt=[5] * 90, max_tokens=11)
    with pytest.raises(TandemError, match="100 tokens, and the prompt alone has 100"):
        complete(served, prompt=[5] * 100)
    assert complete(served, prompt=[5] * 99).sampling.max_tokens == 1


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be of type object"),
        (b"null", "must be of type object"),
        (b'{"model":"m"}', "messages"),
        (b'{"model":"m","messages":[],}', "not valid JSON"),
        (b'{"model":"m","x":NaN}', "not valid JSON"),
        (b'{"model":"\xff"}', "UTF-8"),
        (b'{"model":"m","messages":[],"x":"\xff"}', "UTF-8"),
        (b'{"model":"\\ud800","messages":[]}', "not valid JSON"),
        (b'{"model":"m","messages":[],"temperature":1e999}', "temperature"),
        (b'{"model":"m","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model":"m","tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model":"m","seed":' + b"9" * 5000 + b',"messages":[]}', ""),
    ],
)
def test_invalid_bodies_are_refused_with_the_reason(raw: bytes, expected: str) -> None:
    with pytest.raises(TandemError) as caught:
        chat_params(parse(raw, ChatBody))
        raise AssertionError("taken")
    assert caught.value.kind is INVALID
    assert expected in caught.value.message


def test_the_options_of_the_compiler_do_not_count_as_objects_of_a_schema(make_text: Callable[..., TextModel]) -> None:
    source = schema_source({"allOf": [{}] * (MAX_OBJECTS - 1)}, lenient=True)
    form = StructuredOutput(Grammar("json_schema", source), "response_format")
    grammar, parts = OutputSpec(text=make_text(), form=form, may_think=True).grammar([])
    assert grammar is not None and [part.grammar for part in parts] == [form.grammar, grammar]
