"""One test says it all: the output may not depend on how a request is computed.

Tiny models in float64: token-identical to transformers over the full product of the knobs. The real model in float32
is in `test_same_answer_real.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tandem.core.events import Finished, FinishReason, SampledToken
from tandem.core.request import SamplingParams
from tests.golden.cluster import Cluster, Knobs, Outcome, can_guess
from tests.golden.conftest import TinyModels
from tests.golden.guesses import Method
from tests.golden.models import TINY_VOCAB, Quantization, Reference
from tests.golden.penalties import processors

_OUTPUTS = 30
_MODELS = ("llama", "mistral", "qwen2", "qwen3")
_GREEDY = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)
_SAMPLED = SamplingParams(max_tokens=_OUTPUTS, temperature=1.3, top_p=0.95, top_k=50, seed=11)
# So cold that outputs repeat themselves, as greedy ones do.
_SAMPLED_COLD = SamplingParams(max_tokens=_OUTPUTS, temperature=0.1, seed=5)
_SPECULATION: tuple[Method, ...] = ("off", "mixed")
_PRODUCT = [
    Knobs(
        chunk=chunk,
        block_size=block_size,
        plan_depth=depth,
        remote=remote,
        prefix_hit=hit,
        company=company,
        preempt=preempt,
        speculation=speculation,
    )
    for speculation, chunk, block_size, depth, remote, hit, company, preempt in itertools.product(
        _SPECULATION, (16, 64, None), (8, 16), (1, 2), (False, True), (False, True), (False, True), (False, True)
    )
    if company or not preempt  # a sequence gives way to another one only
    if speculation == "off" or can_guess(depth, remote)
]
_PENALISED = replace(
    _GREEDY,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias=((5, 2.0), (9, -3.0), (200, 1.0)),
    min_tokens=_OUTPUTS,
    stop_token_ids=frozenset(range(0, TINY_VOCAB, 3)),
)
_ON_DEVICE = [replace(knobs, on_device=True) for knobs in _PRODUCT]
# Strides below share no factor with the length, so that every value of every knob occurs.


def _prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY_VOCAB) for _ in range(length)]


_PROMPTS = tuple(_prompt(length, length) for length in (3, 41, 96))
# Two of one length grow at the same time, so that with a block too few the younger has to give way.
_RIVALS = (_prompt(41, 1), _prompt(41, 2))


def _prompts(knobs: Knobs) -> Sequence[list[int]]:
    return _RIVALS if knobs.preempt else _PROMPTS


def expected(reference: Reference, knobs: Knobs, sampling: SamplingParams = _GREEDY) -> list[list[int]]:
    """What transformers says to the same prompts."""
    return [reference.greedy(p, _OUTPUTS, processors(sampling, len(p))) for p in _prompts(knobs)]


def outcomes(
    reference: Reference,
    knobs: Knobs,
    sampling: SamplingParams,
    right: Sequence[Sequence[int]],
    quantization: Quantization = "none",
    prompt_logprobs: int | None = None,
) -> list[Outcome]:
    """Of all prompts under `knobs`. `right` are the outputs that guesses are made from, where some are."""
    prompts = _prompts(knobs)
    answers = [[*prompt, *output] for prompt, output in zip(prompts, right, strict=False)]
    needed = sum(-(-(len(p) + _OUTPUTS) // knobs.block_size) for p in prompts)
    num_blocks = needed - 1 if knobs.preempt else 2 * needed
    executors = [
        reference.executor(
            block_size=knobs.block_size,
            num_blocks=num_blocks if i == knobs.remote else 2 * needed,
            quantization=quantization,
            on_device=knobs.on_device,
        )
        for i in range(1 + knobs.remote)
    ]
    with Cluster(executors, knobs, answers) as cluster:
        return cluster.ask(prompts, sampling, prompt_logprobs)


def run(
    reference: Reference,
    knobs: Knobs,
    sampling: SamplingParams,
    right: Sequence[Sequence[int]],
    quantization: Quantization = "none",
) -> list[list[int]]:
    """The tokens of `outcomes`."""
    return [outcome.ids for outcome in outcomes(reference, knobs, sampling, right, quantization)]


def _check(reference: Reference, product: Sequence[Knobs]) -> None:
    right = {preempt: expected(reference, Knobs(preempt=preempt)) for preempt in (False, True)}
    wrong = [k for k in product if run(reference, k, _GREEDY, right[k.preempt]) != right[k.preempt]]
    assert not wrong, [str(knobs) for knobs in wrong]


@pytest.mark.golden
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", _MODELS)
def test_float64_tokens_equal_transformers_over_the_full_product(tiny: TinyModels, model: str) -> None:
    _check(tiny(model, "float64"), _PRODUCT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", range(len(_MODELS)), ids=_MODELS)
def test_float64_tokens_equal_transformers_over_a_share_of_the_product(tiny: TinyModels, start: int) -> None:
    """The shares of the models together are the product."""
    _check(tiny(_MODELS[start], "float64"), _PRODUCT[start :: len(_MODELS)])


@pytest.mark.parametrize("knobs", _PRODUCT[::25], ids=str)
def test_float64_tokens_equal_transformers(tiny: TinyModels, knobs: Knobs) -> None:
    reference = tiny("llama", "float64")
    right = expected(reference, knobs)
    assert run(reference, knobs, _GREEDY, right) == right


@pytest.mark.parametrize("knobs", _ON_DEVICE[7::29], ids=str)
def test_on_a_device_float64_tokens_equal_transformers(tiny: TinyModels, knobs: Knobs) -> None:
    reference = tiny("qwen3", "float64")
    right = expected(reference, knobs)
    assert run(reference, knobs, _GREEDY, right) == right


@pytest.mark.golden
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", _MODELS)
def test_on_a_device_float64_tokens_equal_transformers_over_the_full_product(tiny: TinyModels, model: str) -> None:
    _check(tiny(model, "float64"), _ON_DEVICE)


@pytest.mark.parametrize("sampling", [_SAMPLED, _PENALISED], ids=["sampled", "penalised"])
@pytest.mark.parametrize("knobs", _ON_DEVICE[9::67], ids=str)
def test_a_device_draws_what_the_host_does(tiny: TinyModels, knobs: Knobs, sampling: SamplingParams) -> None:
    """Its own draws, and those that it leaves to the host."""
    reference = tiny("llama", "float64")
    plain = Knobs(preempt=knobs.preempt)
    right = run(reference, plain, sampling, expected(reference, plain, sampling) if sampling is _PENALISED else ())
    assert run(reference, knobs, sampling, right) == right


@pytest.mark.parametrize("knobs", _PRODUCT[1::17], ids=str)
def test_sampled_tokens_do_not_depend_on_the_knobs(tiny: TinyModels, knobs: Knobs) -> None:
    reference = tiny("qwen3", "float64")
    right = run(reference, Knobs(preempt=knobs.preempt), _SAMPLED, ())
    assert run(reference, knobs, _SAMPLED, right) == right


@pytest.mark.parametrize("knobs", _PRODUCT[3::31], ids=str)
def test_penalised_tokens_equal_transformers(tiny: TinyModels, knobs: Knobs) -> None:
    reference = tiny("llama", "float64")
    right = expected(reference, knobs, _PENALISED)
    assert right != expected(reference, knobs), "the penalties change nothing"
    assert run(reference, knobs, _PENALISED, right) == right


@pytest.mark.parametrize("knobs", _PRODUCT[2::37], ids=str)
def test_penalised_draws_do_not_depend_on_the_knobs(tiny: TinyModels, knobs: Knobs) -> None:
    reference = tiny("qwen2", "float64")
    sampling = replace(_PENALISED, temperature=0.8, top_p=0.9, seed=3)
    right = run(reference, Knobs(preempt=knobs.preempt), sampling, ())
    assert run(reference, knobs, sampling, right) == right


@pytest.mark.golden
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", _MODELS)
def test_penalised_tokens_equal_transformers_over_the_full_product(tiny: TinyModels, model: str) -> None:
    reference = tiny(model, "float64")
    right = {preempt: expected(reference, Knobs(preempt=preempt), _PENALISED) for preempt in (False, True)}
    wrong = [k for k in _PRODUCT if run(reference, k, _PENALISED, right[k.preempt]) != right[k.preempt]]
    assert not wrong, [str(knobs) for knobs in wrong]


def check_scores(reference: Reference, prompt: Sequence[int], scores: Sequence[SampledToken], within: float) -> None:
    """Against transformers' logits of the whole prompt; three alternatives each, in their order."""
    logprobs = torch.log_softmax(reference.logits(prompt).to(torch.float64), -1)
    assert [score.id for score in scores] == list(prompt[1:])
    for row, score in zip(logprobs, scores, strict=False):
        assert score.logprob == pytest.approx(float(row[score.id]), abs=within)
        assert [value for _, value in score.top] == pytest.approx(row.topk(3).values.tolist(), abs=within)
        assert [float(row[token]) for token, _ in score.top] == pytest.approx(row.topk(3).values.tolist(), abs=within)


@pytest.mark.parametrize("knobs", [*_PRODUCT[5::29], *_ON_DEVICE[6::97]], ids=str)
def test_scores_equal_transformers(tiny: TinyModels, knobs: Knobs) -> None:
    """Chunks of all sizes, prompts that another request has cached, guesses on, and the first token after them."""
    reference = tiny("qwen3", "float64")
    right = expected(reference, knobs)
    seen = outcomes(reference, knobs, _GREEDY, right, prompt_logprobs=3)
    assert [outcome.ids for outcome in seen] == right
    for prompt, outcome in zip(_prompts(knobs), seen, strict=True):
        check_scores(reference, prompt, outcome.scores, 1e-9)


@pytest.mark.parametrize("remote", [False, True], ids=["local", "split"])
@pytest.mark.parametrize("scored", [None, 3], ids=["plain", "scored"])
def test_a_prompt_alone_is_computed_and_cached(tiny: TinyModels, remote: bool, scored: int | None) -> None:
    """Nothing is drawn, with one token left of a cached prompt too; whoever comes after finds its blocks."""
    reference = tiny("llama", "float64")
    executors = [reference.executor(block_size=8) for _ in range(1 + remote)]
    with Cluster(executors, Knobs(chunk=16, block_size=8, remote=remote)) as cluster:
        for prompt, num_top, num_cached in (
            (_PROMPTS[1], scored, 0),
            (_PROMPTS[1], scored, 40 if scored is None else 0),
            (_PROMPTS[1], None, 40),
            ([7], scored, 0),
        ):
            name = cluster.submit(prompt, SamplingParams(max_tokens=0), num_top)
            cluster.run()
            outcome, end = cluster.outcomes[name], cluster.outcomes[name].end
            assert isinstance(end, Finished) and (end.reason, end.num_output_tokens) == (FinishReason.LENGTH, 0)
            assert outcome.ids == [] and outcome.pulled is None and end.num_cached_tokens == num_cached
            if num_top is None:
                assert outcome.scores == []
            else:
                check_scores(reference, prompt, outcome.scores, 1e-9)
        books = [node.engine.books() for node in cluster.nodes]
        assert all(b.num_free_blocks == b.num_blocks and not b.num_leases and not b.num_pulls for b in books)


def _check_int8(reference: Reference, product: Sequence[Knobs]) -> None:
    """Int8 rounds away from transformers, but always in the same way."""
    right = {preempt: run(reference, Knobs(preempt=preempt), _GREEDY, (), "int8") for preempt in (False, True)}
    wrong = [k for k in product if run(reference, k, _GREEDY, right[k.preempt], "int8") != right[k.preempt]]
    assert not wrong, [str(knobs) for knobs in wrong]


@pytest.mark.parametrize("start", range(2), ids=["llama", "qwen3"])
def test_int8_tokens_do_not_depend_on_the_knobs(tiny: TinyModels, start: int) -> None:
    _check_int8(tiny(("llama", "qwen3")[start], "float32"), _PRODUCT[start::26])


@pytest.mark.golden
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", _MODELS)
def test_int8_tokens_do_not_depend_on_any_knob(tiny: TinyModels, model: str) -> None:
    _check_int8(tiny(model, "float32"), _PRODUCT)


@pytest.mark.parametrize("sampling", [_GREEDY, _SAMPLED_COLD], ids=["greedy", "sampled"])
@pytest.mark.parametrize("knobs", [Knobs(company=True), Knobs(remote=True, chunk=16)], ids=str)
def test_prompt_lookup_changes_nothing(tiny: TinyModels, knobs: Knobs, sampling: SamplingParams) -> None:
    reference = tiny("llama", "float64")
    plain = run(reference, Knobs(), sampling, ())
    assert run(reference, replace(knobs, speculation="ngram"), sampling, ()) == plain


def test_nixl_moves_the_same_kv(tiny: TinyModels) -> None:
    reference = tiny("llama", "float64")
    knobs = Knobs(remote=True, transport="nixl", company=True)
    right = expected(reference, knobs)
    assert run(reference, knobs, _GREEDY, right) == right
