"""Test the ranges of requests and sampling parameters, checked once at construction."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import HandoffId, JobKey, RequestId
from tandem.core.request import GenerateJob, PrefillJob, Request, SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 2**31),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_out_of_range_is_refused_by_name(param: str, value: float) -> None:
    arguments: dict[str, Any] = {"max_tokens": 1, param: value}
    with pytest.raises(TandemError) as caught:
        SamplingParams(**arguments)
    assert caught.value.kind is ErrorKind.INVALID_REQUEST
    assert caught.value.param == ("top_logprobs" if param == "logprobs" else param)


@pytest.mark.parametrize(
    ("param", "value"),
    [("temperature", 0.0), ("temperature", 2.0), ("top_p", 1.0), ("min_p", 1.0), ("seed", 2**64 - 1), ("logprobs", 20)],
)
def test_the_ends_of_the_ranges_are_in(param: str, value: float) -> None:
    arguments: dict[str, Any] = {"max_tokens": 1, param: value}
    assert getattr(SamplingParams(**arguments), param) == value


def test_a_request_needs_an_id_and_a_prompt() -> None:
    sampling = SamplingParams(max_tokens=1)
    with pytest.raises(TandemError, match="id must not be empty"):
        Request(id=RequestId(""), model="m", prompt_tokens=(1,), sampling=sampling)
    with pytest.raises(TandemError, match="prompt must hold at least one token"):
        Request(id=RequestId("r"), model="m", prompt_tokens=(), sampling=sampling)


def test_a_job_knows_its_key_and_tokens() -> None:
    request = Request(id=RequestId("r"), model="m", prompt_tokens=(1, 2), sampling=SamplingParams(max_tokens=9))
    job = PrefillJob(request=request, attempt=3, choice=1, output_tokens=(5,), handoff=HandoffId("h"))
    assert job.key == JobKey(RequestId("r"), 3, 1)
    assert job.num_known_tokens == 3
    assert GenerateJob(request=request, attempt=1).key < job.key
