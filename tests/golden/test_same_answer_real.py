"""Test the real model in float32: tokens equal transformers', whatever path a request takes; near-ties are counted.

`make test` takes most prompts over the default path and a few over each pair of settings; `make nightly` all of them
over each setting.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tandem.core.request import SamplingParams
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, TransportKind, executors_with_room
from tests.golden.guesses import Method
from tests.golden.models import NearTie, Quantization, Reference, check_greedy, check_sampled

pytestmark = pytest.mark.timeout(900)

Judge = Callable[[tuple[int, ...], tuple[int, ...]], tuple[NearTie, ...]]

NUM_THREADS = 2
_OUTPUTS = 16
_GREEDY = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)
_TRANSPORTS: tuple[TransportKind | None, ...] = (None, "local", "nixl")
_SPECULATION: tuple[Method, ...] = ("off", "ngram")
_DEFAULT = Knobs(chunk=512, remote=True, transport="nixl", company=True)
_VARIANTS = (
    _DEFAULT,
    *(replace(_DEFAULT, chunk=chunk) for chunk in (16, 64, None)),
    *(replace(_DEFAULT, block_size=size) for size in (8, 32)),
    replace(_DEFAULT, company=False),
    replace(_DEFAULT, plan_depth=2),
    replace(_DEFAULT, prefix_hit=True),
    replace(_DEFAULT, transport="local"),
    replace(_DEFAULT, remote=False),
    replace(_DEFAULT, remote=False, chunk=64, prefix_hit=True),
    replace(_DEFAULT, speculation="ngram"),
)
_PRODUCT = [
    Knobs(
        chunk=chunk,
        block_size=block_size,
        plan_depth=depth,
        remote=transport is not None,
        transport=transport or "local",
        prefix_hit=hit,
        company=company,
        speculation=speculation,
    )
    for chunk, block_size, depth, transport, hit, company, speculation in itertools.product(
        (16, 64, 512, None), (8, 16, 32), (1, 2), _TRANSPORTS, (False, True), (False, True), _SPECULATION
    )
]


@pytest.fixture(scope="module")
def judge(real: Reference) -> Judge:
    """Near-ties of an output; raises when it is wrong. Equal outputs are looked at once."""

    @cache
    def check(prompt: tuple[int, ...], output: tuple[int, ...]) -> tuple[NearTie, ...]:
        return tuple(check_greedy(real, prompt, output))

    return check


def _outputs(
    real: Reference,
    texts: Sequence[list[int]],
    knobs: Knobs,
    sampling: SamplingParams,
    quantization: Quantization = "none",
) -> list[tuple[int, ...]]:
    executors = executors_with_room(real, knobs, texts, _OUTPUTS, quantization=quantization)
    with Cluster(executors, knobs) as cluster:
        return [tuple(outcome.ids) for outcome in cluster.run_requests(texts, sampling)]


def _check(real: Reference, judge: Judge, texts: Sequence[list[int]], knobs: Knobs) -> None:
    outputs = _outputs(real, texts, knobs, _GREEDY)
    ties = [tie for prompt, output in zip(texts, outputs, strict=True) for tie in judge(tuple(prompt), output)]
    print(f"{knobs}: {len(ties)} near-ties in {len(texts) * _OUTPUTS} tokens", *ties, sep="\n  ")  # noqa: T201
    assert len(ties) <= 2


def test_half_of_the_prompts_over_the_default_path(real: Reference, judge: Judge, texts: list[list[int]]) -> None:
    """Every other one, up to 700 tokens; `make nightly` takes all."""
    _check(real, judge, texts[:-2:2], _DEFAULT)


@pytest.mark.parametrize("knobs", covering(_PRODUCT), ids=str)
def test_a_few_prompts_over_each_pair_of_settings(
    real: Reference, judge: Judge, texts: list[list[int]], knobs: Knobs
) -> None:
    _check(real, judge, [texts[i] for i in (0, 19)], knobs)


@pytest.mark.nightly
def test_a_few_prompts_on_a_device(real: Reference, judge: Judge, texts: list[list[int]]) -> None:
    """With reference kernels, which take minutes."""
    knobs = replace(_DEFAULT, plan_depth=2, on_device=True)
    _check(real, judge, [texts[i] for i in (0, 4, 9, 19, 20)], knobs)


@pytest.mark.parametrize(
    ("knobs", "params"),
    [
        (_DEFAULT, {"top_p": 0.9}),
        (replace(_DEFAULT, remote=False, chunk=64), {"temperature": 1.4, "top_k": 40, "min_p": 0.02}),
    ],
    ids=str,
)
def test_seeded_samples_follow_the_logits_of_transformers(
    real: Reference, texts: list[list[int]], params: dict[str, Any], knobs: Knobs
) -> None:
    sampling = SamplingParams(max_tokens=_OUTPUTS, seed=2**63 + 5, **params)
    some = [texts[i] for i in (0, 4, 9, 19)]
    outputs = _outputs(real, some, knobs, sampling)
    ties = [t for p, o in zip(some, outputs, strict=True) for t in check_sampled(real, p, o, sampling)]
    assert len(ties) <= 1, [str(tie) for tie in ties]


@pytest.mark.parametrize("knobs", [_DEFAULT, replace(_DEFAULT, remote=False, chunk=64)], ids=str)
def test_penalised_tokens_equal_transformers(real: Reference, texts: list[list[int]], knobs: Knobs) -> None:
    """The stop tokens are all that a sentence needs, so that `min_tokens` is felt."""
    some = [texts[i] for i in (0, 4, 9, 19)]
    plain = _outputs(real, some, knobs, _GREEDY)
    sampling = replace(
        _GREEDY,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((28, -2.0), (30, 1.5)),
        min_tokens=_OUTPUTS,
        stop_token_ids=frozenset(output[3] for output in plain),
    )
    outputs = _outputs(real, some, knobs, sampling)
    assert all(one != other for one, other in zip(plain, outputs, strict=True))
    ties = [
        tie
        for prompt, output in zip(some, outputs, strict=True)
        for tie in check_greedy(real, prompt, output, sampling)
    ]
    assert len(ties) <= 1, [str(tie) for tie in ties]


@pytest.mark.parametrize("knobs", [replace(_DEFAULT, prefix_hit=True), Knobs(chunk=64, company=True)], ids=str)
def test_scores_equal_transformers(real: Reference, texts: list[list[int]], knobs: Knobs) -> None:
    some = [texts[i] for i in (0, 4, 19)]
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    with Cluster(executors_with_room(real, knobs, some, _OUTPUTS), knobs) as cluster:
        seen = cluster.run_requests(some, sampling, prompt_logprobs=5)
    for prompt, outcome in zip(some, seen, strict=True):
        logprobs = torch.log_softmax(real.logits(prompt[:-1]).double(), -1)
        known, top = logprobs.gather(1, torch.tensor(prompt[1:])[:, None]), logprobs.topk(5).values
        assert [score.id for score in outcome.scores] == prompt[1:]
        assert torch.allclose(torch.tensor([[s.logprob] for s in outcome.scores]).double(), known, 0, 1e-4)
        assert torch.allclose(torch.tensor([[x for _, x in s.top] for s in outcome.scores]).double(), top, 0, 1e-4)


def _check_int8(real: Reference, texts: Sequence[list[int]], product: Sequence[Knobs]) -> None:
    """Int8 rounds away from transformers (see test_int8.py), but always in the same way: not a near-tie differs."""
    right = _outputs(real, texts, Knobs(chunk=None), _GREEDY, "int8")
    for knobs in product:
        assert _outputs(real, texts, knobs, _GREEDY, "int8") == right, str(knobs)


def test_int8_tokens_do_not_depend_on_the_path(real: Reference, texts: list[list[int]]) -> None:
    _check_int8(real, [texts[i] for i in (0, 19)], _VARIANTS)


@pytest.mark.nightly
def test_int8_tokens_of_every_prompt_do_not_depend_on_any_setting(real: Reference, texts: list[list[int]]) -> None:
    _check_int8(real, texts, _VARIANTS)


@pytest.mark.parametrize("num_tokens", [32, 64])
def test_a_preempted_sequence_continues_with_the_same_tokens(
    real: Reference, judge: Judge, texts: list[list[int]], num_tokens: int
) -> None:
    """Two of one length want a further block at the same time, and one is missing."""
    rivals = [texts[-1][:num_tokens], texts[-2][:num_tokens]]
    _check(real, judge, rivals, replace(_DEFAULT, remote=False, preempt=True))


@pytest.mark.nightly
@pytest.mark.parametrize("knobs", _VARIANTS, ids=str)
def test_every_prompt_over_each_setting(real: Reference, judge: Judge, texts: list[list[int]], knobs: Knobs) -> None:
    _check(real, judge, texts, knobs)
