"""One test says it all: the output may not depend on how a request is computed.

Tiny models in float64: token-identical to transformers over the full product of the knobs. The real model in float32
is in `test_same_answer_real.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch

from tandem.core.events import Finished, FinishReason, SampledToken
from tandem.core.request import SamplingParams
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, Outcome, can_guess, executors_with_room
from tests.golden.conftest import TinyModels
from tests.golden.guesses import Method
from tests.golden.models import TINY_FAMILIES, TINY_VOCAB, Quantization, Reference, random_prompt

_OUTPUTS = 30
_MODELS = ("llama", "mistral", "qwen2", "qwen3")
"""Models of the full product."""
_GREEDY = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)
_SAMPLED = SamplingParams(max_tokens=_OUTPUTS, temperature=1.3, top_p=0.95, top_k=50, seed=11)
# So cold that outputs repeat themselves, as greedy ones do.
_SAMPLED_COLD = SamplingParams(max_tokens=_OUTPUTS, temperature=0.1, seed=5)
_PENALISED = replace(
    _GREEDY,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias=((5, 2.0), (9, -3.0), (200, 1.0)),
    min_tokens=_OUTPUTS,
    stop_token_ids=frozenset(range(0, TINY_VOCAB, 3)),
)
_KINDS = {
    "greedy": _GREEDY,
    "scored": _GREEDY,
    "sampled": _SAMPLED,
    "penalised": _PENALISED,
    "penalised-sampled": replace(_PENALISED, temperature=0.8, top_p=0.9, seed=3),
    "int8": _GREEDY,
}
_BOTH = (False, True)
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
        on_device=on_device,
    )
    for on_device, speculation, chunk, block_size, depth, remote, hit, company, preempt in itertools.product(
        _BOTH, _SPECULATION, (16, 64, None), (8, 16), (1, 2), _BOTH, _BOTH, _BOTH, _BOTH
    )
    if company or not preempt  # a sequence gives way to another one only
    if speculation == "off" or can_guess(depth, remote)
]


_PROMPTS = tuple(random_prompt(length, length) for length in (3, 41, 96))
# Two of one length grow at the same time, so that with a block too few the younger has to give way.
_RIVALS = (random_prompt(41, 1), random_prompt(41, 2))


def _prompts(knobs: Knobs) -> Sequence[list[int]]:
    return _RIVALS if knobs.preempt else _PROMPTS


def expected(reference: Reference, knobs: Knobs, sampling: SamplingParams = _GREEDY) -> list[list[int]]:
    """What transformers says to the same prompts."""
    return [reference.greedy(p, _OUTPUTS, sampling) for p in _prompts(knobs)]


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
    executors = executors_with_room(reference, knobs, prompts, _OUTPUTS, quantization=quantization)
    with Cluster(executors, knobs, answers) as cluster:
        return cluster.run_requests(prompts, sampling, prompt_logprobs)


def run(
    reference: Reference,
    knobs: Knobs,
    sampling: SamplingParams,
    right: Sequence[Sequence[int]],
    quantization: Quantization = "none",
) -> list[list[int]]:
    """Return the tokens of `outcomes`."""
    return [outcome.ids for outcome in outcomes(reference, knobs, sampling, right, quantization)]


@dataclass(frozen=True, slots=True)
class _Case:
    """A kind of sampling, by its name in `_KINDS`, of a tiny model under some knobs."""

    model: str
    kind: str
    knobs: Knobs

    def __str__(self) -> str:
        return f"{self.model}-{self.kind}-{self.knobs}"

    def check(self, reference: Reference) -> None:
        """Assert that the tokens are transformers', or where it has no such draw those of plain knobs."""
        knobs, sampling = self.knobs, _KINDS[self.kind]
        right = self._expected(reference)
        if self.kind != "scored":
            quantization: Quantization = "int8" if self.kind == "int8" else "none"
            assert run(reference, knobs, sampling, right, quantization) == right, str(self)
            return
        seen = outcomes(reference, knobs, sampling, right, prompt_logprobs=3)
        assert [outcome.ids for outcome in seen] == right, str(self)
        for prompt, outcome in zip(_prompts(knobs), seen, strict=True):
            # Routers compute their scores in float32.
            within = 1e-9 if self.model in _MODELS else 1e-5
            check_scores(reference, prompt, outcome.scores, within)

    def _expected(self, reference: Reference) -> list[list[int]]:
        plain, sampling = Knobs(preempt=self.knobs.preempt), _KINDS[self.kind]
        if self.kind == "int8":  # rounds away from transformers, but always in the same way
            return _once(reference, plain, sampling, "int8")
        if sampling.temperature:
            return _once(reference, plain, sampling, "none")
        right = expected(reference, plain, sampling)
        assert self.kind != "penalised" or right != expected(reference, plain), "the penalties change nothing"
        return right


@cache
def _once(reference: Reference, knobs: Knobs, sampling: SamplingParams, quantization: Quantization) -> list[list[int]]:
    return run(reference, knobs, sampling, (), quantization)


_CASES = [
    _Case(model, kind, knobs)
    for model, kind, knobs in itertools.product(_MODELS, _KINDS, _PRODUCT)
    if not (kind == "int8" and knobs.on_device)
]
_FAMILY_CASES = [
    _Case(model, kind, knobs)
    for model, kind, knobs in itertools.product(TINY_FAMILIES, _KINDS, covering(_PRODUCT))
    if kind != "int8"
]


@pytest.mark.parametrize("case", covering(_CASES), ids=str)
def test_the_answer_is_the_same(tiny: TinyModels, case: _Case) -> None:
    """Each pair of values of model, kind of sampling and knobs occurs; `make nightly` has the full product."""
    case.check(tiny(case.model, "float32" if case.kind == "int8" else "float64"))


@pytest.mark.parametrize("case", covering(_FAMILY_CASES), ids=str)
def test_the_answer_of_each_family_is_the_same(tiny: TinyModels, case: _Case) -> None:
    """Each family, with the kernels of the reference, meets each kind of sampling and each value of each knob."""
    case.check(tiny(case.model, "float64"))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("model", _MODELS)
def test_the_answer_is_the_same_over_the_full_product(tiny: TinyModels, model: str, kind: str) -> None:
    reference = tiny(model, "float32" if kind == "int8" else "float64")
    for case in _CASES:
        if (case.model, case.kind) == (model, kind):
            case.check(reference)


def check_scores(reference: Reference, prompt: Sequence[int], scores: Sequence[SampledToken], within: float) -> None:
    """Against transformers' logits of the whole prompt; three alternatives each, in their order."""
    logprobs = torch.log_softmax(reference.logits(prompt).to(torch.float64), -1)
    assert [score.id for score in scores] == list(prompt[1:])
    for row, score in zip(logprobs, scores, strict=False):
        assert score.logprob == pytest.approx(float(row[score.id]), abs=within)
        assert [value for _, value in score.top] == pytest.approx(row.topk(3).values.tolist(), abs=within)
        assert [float(row[token]) for token, _ in score.top] == pytest.approx(row.topk(3).values.tolist(), abs=within)


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
