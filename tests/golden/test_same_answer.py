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

from tandem.core.request import SamplingParams
from tests.golden.cluster import Cluster, Knobs, can_guess
from tests.golden.conftest import TinyModels
from tests.golden.guesses import Method
from tests.golden.models import TINY_VOCAB, Quantization, Reference

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
# Strides below share no factor with the length, so that every value of every knob occurs.


def _prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY_VOCAB) for _ in range(length)]


_PROMPTS = tuple(_prompt(length, length) for length in (3, 41, 96))
# Two of one length grow at the same time, so that with a block too few the younger has to give way.
_RIVALS = (_prompt(41, 1), _prompt(41, 2))


def _prompts(knobs: Knobs) -> Sequence[list[int]]:
    return _RIVALS if knobs.preempt else _PROMPTS


def expected(reference: Reference, knobs: Knobs) -> list[list[int]]:
    """What transformers says to the same prompts."""
    return [reference.greedy(prompt, _OUTPUTS) for prompt in _prompts(knobs)]


def run(
    reference: Reference,
    knobs: Knobs,
    sampling: SamplingParams,
    right: Sequence[Sequence[int]],
    quantization: Quantization = "none",
) -> list[list[int]]:
    """Outputs of all prompts under `knobs`. `right` are the outputs that guesses are made from, where some are."""
    prompts = _prompts(knobs)
    answers = [[*prompt, *output] for prompt, output in zip(prompts, right, strict=False)]
    needed = sum(-(-(len(p) + _OUTPUTS) // knobs.block_size) for p in prompts)
    num_blocks = needed - 1 if knobs.preempt else 2 * needed
    executors = [
        reference.executor(
            block_size=knobs.block_size,
            num_blocks=num_blocks if i == knobs.remote else 2 * needed,
            quantization=quantization,
        )
        for i in range(1 + knobs.remote)
    ]
    with Cluster(executors, knobs, answers) as cluster:
        return [outcome.ids for outcome in cluster.ask(prompts, sampling)]


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


@pytest.mark.parametrize("knobs", _PRODUCT[1::17], ids=str)
def test_sampled_tokens_do_not_depend_on_the_knobs(tiny: TinyModels, knobs: Knobs) -> None:
    reference = tiny("qwen3", "float64")
    right = run(reference, Knobs(preempt=knobs.preempt), _SAMPLED, ())
    assert run(reference, knobs, _SAMPLED, right) == right


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
