"""Test the answers of `tandem serve` against transformers in float32: greedy tokens and their logprobs, a prefix hit,
and seeded samples; on the CPU, and where there is a GPU on two workers that share it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from tandem.core.request import SamplingParams
from tests.e2e.serve.served import Served
from tests.golden.models import NEAR_TIE, REAL_MODEL, Reference, check_greedy, check_sampled, real_model
from tests.golden.prompts import prompts

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

_OUTPUTS = 24
_LONGEST = 700
"""Longest prompt in tokens: longer than a chunk, short enough for one thread."""
_SEEDED = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}
_PATIENCE_S = 90.0

_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=_NO_GPU)])
def running(request: pytest.FixtureRequest) -> Iterator[Served]:
    if request.param == "cpu":
        start_when_needed: Callable[[], Served] = request.getfixturevalue("start_when_needed")
        yield start_when_needed()
        return
    with Served("--port", "0", "--device", "cuda", "--dtype", "float32") as served:
        yield served.wait_ready()


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield real_model()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def short_prompts(reference: Reference) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(reference.directory / "tokenizer.json"))
    return [prompt for prompt in prompts(tokenizer) if len(prompt) <= _LONGEST]


def _complete(served: Served, prompt: Sequence[int], **options: object) -> dict[str, Any]:
    """Return the answer after checking that it went through both workers."""
    body = {"model": REAL_MODEL, "prompt": list(prompt), "max_tokens": _OUTPUTS, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "logprobs": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json=body | options, timeout=_PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-tandem-path"] == "remote"
    found: dict[str, Any] = answer.json()
    assert len(found["choices"][0]["token_ids"]) == _OUTPUTS
    return found


def _check_logprobs(reference: Reference, prompt: Sequence[int], choice: dict[str, Any]) -> None:
    got = choice["token_ids"]
    rows = torch.log_softmax(reference.last_logits([*prompt, *got[:-1]], _OUTPUTS).double(), -1)
    expected = rows.gather(1, torch.tensor(got)[:, None])[:, 0].tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=NEAR_TIE)


def test_greedy_tokens_equal_transformers(
    running: Served, reference: Reference, short_prompts: list[list[int]]
) -> None:
    ties = []
    for prompt in short_prompts:
        choice = _complete(running, prompt)["choices"][0]
        ties += check_greedy(reference, prompt, choice["token_ids"])
        _check_logprobs(reference, prompt, choice)
    assert len(short_prompts) > 20 and max(map(len, short_prompts)) == _LONGEST
    assert len(ties) <= 2, [str(tie) for tie in ties]


def test_a_prefix_hit_changes_nothing(running: Served, reference: Reference, short_prompts: list[list[int]]) -> None:
    prompt = [*reversed(short_prompts[-1])]
    first, again = _complete(running, prompt), _complete(running, prompt)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > len(prompt) // 2
    check_greedy(reference, prompt, first["choices"][0]["token_ids"])
    check_greedy(reference, prompt, again["choices"][0]["token_ids"])
    _check_logprobs(reference, prompt, again["choices"][0])


def test_seeded_samples_match_the_logits_of_transformers(
    running: Served, reference: Reference, short_prompts: list[list[int]]
) -> None:
    for seed, prompt in enumerate(short_prompts[::4]):
        got = _complete(running, prompt, seed=seed, **_SEEDED)["choices"][0]["token_ids"]
        sampling = SamplingParams(max_tokens=_OUTPUTS, temperature=0.8, top_p=0.95, top_k=40, seed=seed)
        check_sampled(reference, prompt, got, sampling)
