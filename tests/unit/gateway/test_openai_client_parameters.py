"""Test every parameter with the openai client as the referee: what it sends arrives, and it can read the replies."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import openai
import pytest

from tandem.core.lane import Lane
from tests.unit.gateway import instant
from tests.unit.gateway.openai_replies import collected

Front = Any  # the fixtures' class lives in conftest
MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "Paris 你好 😀."


def create_both(client: openai.OpenAI, **options: Any) -> tuple[Any, Any]:
    """Return the answers of a chat and of a completion with the same options."""
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, **options)
    return chat, client.completions.create(model="tiny", prompt="x", **options)


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"temperature": 0.3}, "sampling.temperature", 0.3),
        ({"top_p": 0.4}, "sampling.top_p", 0.4),
        ({"seed": 9}, "sampling.seed", 9),
        ({"presence_penalty": 0.5}, "sampling.presence_penalty", 0.5),
        ({"frequency_penalty": -0.5}, "sampling.frequency_penalty", -0.5),
        ({"logit_bias": {"30": 5, "7": -100}}, "sampling.logit_bias", ((7, -100.0), (30, 5.0))),
        ({"max_tokens": 3}, "sampling.max_tokens", 3),
        ({"extra_body": {"top_k": 4}}, "sampling.top_k", 4),
        ({"extra_body": {"min_p": 0.1}}, "sampling.min_p", 0.1),
        ({"extra_body": {"repetition_penalty": 1.2}}, "sampling.repetition_penalty", 1.2),
        ({"extra_body": {"min_tokens": 2}}, "sampling.min_tokens", 2),
        ({"extra_body": {"stop_token_ids": [9, 8]}}, "sampling.stop_token_ids", frozenset({1, 8, 9})),
        ({"extra_body": {"stop_token_ids": [9], "ignore_eos": True}}, "sampling.stop_token_ids", frozenset({9})),
        ({"n": 3}, "num_choices", 3),
        ({"extra_body": {"priority": -2}}, "priority", -2),
        ({"extra_body": {"cache_salt": "mine"}}, "cache_salt", "mine"),
        ({"extra_body": {"cache_control": {"type": "ephemeral"}}}, "retain_s", 300.0),
        ({"extra_body": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}, "retain_s", 3600.0),
        ({"extra_body": {"cache_control": {"type": "ephemeral", "ttl": 90}}}, "retain_s", 90.0),
        ({"extra_body": {"prompt_cache_retention": "24h"}}, "retain_s", 86_400.0),
        ({"extra_body": {"prompt_cache_retention": "in_memory"}}, "retain_s", 0.0),
        ({"extra_body": {"service_tier": "flex"}}, "lane", Lane.BATCH),
        ({"extra_body": {"service_tier": "default"}}, "lane", Lane.STANDARD),
        ({"extra_body": {"service_tier": "priority"}}, "lane", Lane.INTERACTIVE),
        ({"extra_body": {"service_tier": "auto"}}, "lane", Lane.INTERACTIVE),
        ({"extra_body": {"service_tier": "scale"}}, "lane", Lane.INTERACTIVE),
        ({"extra_headers": {"x-tandem-lane": "Batch"}}, "lane", Lane.BATCH),
        (
            {"extra_headers": {"x-tandem-lane": "standard"}, "extra_body": {"service_tier": "flex"}},
            "lane",
            Lane.STANDARD,
        ),
        ({"user": "somebody"}, "priority", 0),
    ],
)
def test_parameters_arrive(
    front: Front, client: openai.OpenAI, options: dict[str, Any], field: str, expected: Any
) -> None:
    front.instant()
    create_both(client, **options)
    assert list(map(attrgetter(field), front.dispatch.requests)) == [expected, expected]


@pytest.mark.parametrize(("tier", "used"), [("flex", "flex"), ("auto", "priority"), (None, None)])
def test_the_reply_names_the_used_service_tier(
    front: Front, client: openai.OpenAI, tier: Any, used: str | None
) -> None:
    front.instant()
    options: Any = {"service_tier": tier} if tier else {}
    assert client.chat.completions.create(model="tiny", messages=MESSAGES, **options).service_tier == used
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **options))
    assert {chunk.service_tier for chunk in chunks} == {used}


@pytest.mark.parametrize(
    ("header", "field", "expected"),
    [(None, None, None), (None, "off", "off"), ("Strict", None, "strict"), ("OFF", "strict", "off")],
)
def test_a_header_chooses_disaggregation_before_the_body(
    front: Front, client: openai.OpenAI, header: str | None, field: str | None, expected: str | None
) -> None:
    front.instant()
    options: Any = {"extra_body": {"disaggregation": field}, "extra_headers": {}}
    if header is not None:
        options["extra_headers"] = {"x-tandem-disaggregation": header}
    create_both(client, **options)
    assert [caller.disaggregation for caller in front.dispatch.callers] == [expected, expected]


def test_a_deadline_reaches_the_dispatch(front: Front, client: openai.OpenAI) -> None:
    front.instant()
    create_both(client, extra_headers={"x-request-timeout-ms": "1500"})
    client.completions.create(model="tiny", prompt="x")
    assert [caller.timeout_s for caller in front.dispatch.callers] == [1.5, 1.5, None]


@pytest.mark.parametrize(
    ("header", "given"),
    [
        ("x-tandem-lane", "fast"),
        ("x-tandem-disaggregation", "on"),
        *(("x-request-timeout-ms", given) for given in ("", "0", "-1", "1.5", "1e3", "soon", "86400001", "9" * 5000)),
    ],
)
def test_an_invalid_header_is_refused_by_name(client: openai.OpenAI, header: str, given: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", extra_headers={header: given})
    assert caught.value.param == header


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_nothing_before_min_tokens(front: Front, client: openai.OpenAI, stream: bool) -> None:
    num_before = len(front.ids("a好b"))
    for fewest, text in ((0, "a"), (num_before, "a好b"), (40, "a好b好c")):
        front.answer("a好b好c")
        options: Any = {"stop": ["好"], "extra_body": {"min_tokens": fewest}}
        assert texts_and_reasons(client, stream=stream, **options)[0] == [text]


@pytest.mark.parametrize(("include", "shown"), [(False, "Paris "), (True, "Paris 你好")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_included_only_on_request(
    front: Front, client: openai.OpenAI, include: bool, shown: str, stream: bool
) -> None:
    front.instant(TEXT)
    options: Any = {"stop": ["你好"], "extra_body": {"include_stop_str_in_output": include}}
    assert texts_and_reasons(client, stream=stream, **options) == ([shown], ["stop"])


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_included_only_on_request(front: Front, client: openai.OpenAI, include: bool) -> None:
    par = front.ids("Paris")[0]
    front.stream(par, front.finished())
    options: Any = {"extra_body": {"stop_token_ids": [par], "include_stop_str_in_output": include}}
    assert texts_and_reasons(client, stream=False, **options)[0] == [front.text([par]) if include else ""]


@pytest.mark.parametrize(("skip", "shown"), [(None, "Paris"), (True, "Paris"), (False, "<|im_start|>Paris")])
@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_are_included_only_on_request(
    front: Front, client: openai.OpenAI, skip: bool | None, shown: str, stream: bool
) -> None:
    front.stream(2, "Paris", 1, front.finished())
    options: Any = {"extra_body": {"skip_special_tokens": skip, "spaces_between_special_tokens": True}}
    assert texts_and_reasons(client, stream=stream, **options)[0] == [shown]


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(front: Front, client: openai.OpenAI, stream: bool) -> None:
    opened = front.instant(TEXT)
    texts, reasons = texts_and_reasons(client, stream=stream, n=3)
    start = front.text(front.ids(TEXT)[:1])
    assert texts == [TEXT, start + TEXT, start * 2 + TEXT]
    assert reasons == ["stop"] * 3
    assert opened[0].closed.wait(20) and opened[0].num_closes == 1


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_a_prompt_once_and_every_choice(front: Front, client: openai.OpenAI, stream: bool) -> None:
    front.instant(TEXT)
    options: Any = {"stream_options": {"include_usage": True}} if stream else {}
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, n=3, stream=stream, **options)
    _, usage, _ = collected(answer, stream)
    assert usage["prompt_tokens"] == len(front.dispatch.requests[0].prompt_tokens)
    assert usage["completion_tokens"] == 3 * (len(front.ids(TEXT)) + 1) + 0 + 1 + 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == instant.NUM_CACHED


def test_each_chunk_has_its_usage_on_request(front: Front, client: openai.OpenAI) -> None:
    front.instant(TEXT)
    options: Any = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for chunks in create_both(client, **options):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == len(front.ids(TEXT)) + 1
        assert len(set(counts)) > 3


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_several_choices(front: Front, client: openai.OpenAI, stream: bool) -> None:
    front.instant(TEXT)
    answer: Any = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, stream=stream
    )
    choices, _, _ = collected(answer, stream)
    for entry in choices[0].scores + choices[1].scores:
        assert (entry["logprob"], len(entry["top_logprobs"])) == (instant.LOGPROB, 2)
    first, second = (b"".join(bytes(entry["bytes"]) for entry in choice.scores) for choice in choices)
    assert first == TEXT.encode()
    assert second.endswith(TEXT.encode()) and len(second) > len(first)


def test_best_of_may_only_be_n(front: Front, client: openai.OpenAI) -> None:
    front.instant()
    assert len(client.completions.create(model="tiny", prompt="x", n=2, best_of=2).choices) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x", n=2, best_of=3)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported")


def test_a_final_message_is_continued(front: Front, client: openai.OpenAI) -> None:
    front.instant()
    started = [*MESSAGES, {"role": "assistant", "content": "It is Par"}]
    for options in ({"continue_final_message": True}, {"add_generation_prompt": False}, {}):
        client.chat.completions.create(model="tiny", messages=started, extra_body=options)
    endings = [front.text(request.prompt_tokens) for request in front.dispatch.requests]
    assert endings[0].endswith("<|im_start|>assistant\nIt is Par")
    assert endings[1] == endings[0] + "<|im_end|>\n"
    assert endings[2] == endings[1] + "<|im_start|>assistant\n"
    with pytest.raises(openai.BadRequestError) as caught:
        both = {"continue_final_message": True, "add_generation_prompt": True}
        client.chat.completions.create(model="tiny", messages=started, extra_body=both)
    assert caught.value.param == "continue_final_message"


def test_developers_and_content_parts(front: Front, client: openai.OpenAI) -> None:
    front.instant()
    parts: Any = [{"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    client.chat.completions.create(model="tiny", messages=parts)
    client.chat.completions.create(model="tiny", messages=[{"role": "system", "content": "a\nb"}])
    one, other = [request.prompt_tokens for request in front.dispatch.requests]
    assert one == other


def texts_and_reasons(client: openai.OpenAI, *, stream: bool, **options: Any) -> tuple[list[str], list[str | None]]:
    """Texts and finish reasons of all choices, the same from chats and completions."""
    answers = create_both(client, stream=stream, **options)
    in_chat, in_completion = (collected(answer, stream)[0] for answer in answers)
    assert all(choice.ended and choice.num_roles == 1 for choice in in_chat)
    assert in_completion == [replace(choice, num_roles=0) for choice in in_chat]
    return [choice.text for choice in in_chat], [choice.ended for choice in in_chat]
