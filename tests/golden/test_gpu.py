"""Test the executor of GPUs on one, with its own kernels and graphs, against transformers on the CPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tandem.core.request import SamplingParams
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, can_guess, executors_with_room
from tests.golden.conftest import TinyModels
from tests.golden.models import (
    TINY,
    NearTie,
    Reference,
    check_greedy,
    check_sampled,
    in_chunks,
    random_prompt,
    teacher_forced,
)
from tests.golden.steps import generate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_OUTPUTS = 30
_MOST_TIES = 1
_GREEDY = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)
_KINDS = {
    "greedy": _GREEDY,
    "penalised": replace(_GREEDY, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
    "sampled": SamplingParams(max_tokens=_OUTPUTS, temperature=1.3, top_p=0.95, top_k=50, seed=11),
}
_MODELS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo2", "glm4", "qwen3-moe", "glm4-moe")
_BOTH = (False, True)
_KNOBS = [
    Knobs(
        chunk=chunk,
        block_size=block_size,
        plan_depth=depth,
        remote=remote,
        transport="nixl",
        prefix_hit=hit,
        company=company,
        preempt=preempt,
        speculation="mixed" if guesses else "off",
    )
    for chunk, block_size, depth, remote, hit, company, preempt, guesses in itertools.product(
        (16, 64, None), (8, 16, 64), (1, 2), _BOTH, _BOTH, _BOTH, _BOTH, _BOTH
    )
    if company or not preempt
    if not (preempt and block_size == 64)  # the two prompts and their outputs fill their blocks but in part
    if not guesses or can_guess(depth, remote)
]
_CASES = [
    (name, kind, knobs)
    for name, kind, knobs in itertools.product(_MODELS, _KINDS, _KNOBS)
    if kind == "greedy" or knobs.speculation == "off"
]
_PROMPTS = tuple(random_prompt(length, length) for length in (3, 41, 96, 210))
_RIVALS = (random_prompt(41, 1), random_prompt(41, 2))


@pytest.mark.parametrize(("name", "kind", "knobs"), covering(_CASES), ids=str)
def test_tokens_equal_transformers_in_float32(tiny: TinyModels, name: str, kind: str, knobs: Knobs) -> None:
    reference, sampling = tiny(name, "float32"), _KINDS[kind]
    prompts = _RIVALS if knobs.preempt else _PROMPTS
    executors = executors_with_room(reference, knobs, prompts, _OUTPUTS, device="cuda")
    answers = [[*prompt, *reference.greedy(prompt, _OUTPUTS)] for prompt in prompts]
    with Cluster(executors, knobs, answers) as cluster:
        outcomes = cluster.run_requests(prompts, sampling)
    ties: list[NearTie] = []
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if sampling.temperature:
            ties += check_sampled(reference, prompt, outcome.ids, sampling)
        else:
            ties += check_greedy(reference, prompt, outcome.ids, sampling)
    assert len(ties) <= _MOST_TIES, [str(tie) for tie in ties]


_DEFAULT = Knobs(chunk=512, block_size=64, plan_depth=2, remote=True, transport="nixl", company=True)
_VARIANTS = (
    _DEFAULT,
    replace(_DEFAULT, chunk=64, block_size=16),
    replace(_DEFAULT, chunk=None),
    replace(_DEFAULT, company=False, plan_depth=1),
    replace(_DEFAULT, prefix_hit=True),
    replace(_DEFAULT, remote=False),
    replace(_DEFAULT, remote=False, chunk=64, prefix_hit=True),
    replace(_DEFAULT, speculation="ngram", plan_depth=1),
)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("knobs", _VARIANTS, ids=str)
def test_the_real_model_s_tokens_equal_transformers(real: Reference, texts: list[list[int]], knobs: Knobs) -> None:
    executors = executors_with_room(real, knobs, texts, _OUTPUTS, device="cuda", max_num_seqs=64)
    with Cluster(executors, knobs) as cluster:
        outcomes = cluster.run_requests(texts, _GREEDY)
    ties = [
        tie for prompt, outcome in zip(texts, outcomes, strict=True) for tie in check_greedy(real, prompt, outcome.ids)
    ]
    print(f"{knobs}: {len(ties)} near-ties in {len(texts) * _OUTPUTS} tokens", *ties, sep="\n  ")  # noqa: T201
    assert len(ties) <= 2 * _MOST_TIES, [str(tie) for tie in ties]


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("float16", 0.02), ("bfloat16", 0.15)])
def test_logits_follow_transformers(tiny: TinyModels, name: str, dtype: str, tolerance: float) -> None:
    reference, tokens = tiny(name, dtype), random_prompt(90, 7)
    theirs = reference.logits(tokens).float()
    ours = teacher_forced(reference.executor(device="cuda"), tokens).float()
    assert float((ours - theirs).abs().max()) < tolerance * float(theirs.std())


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_logits_keep_their_bits_in_chunks(tiny: TinyModels, name: str, dtype: str) -> None:
    executor = tiny(name, dtype).executor(device="cuda", batch_invariant=True)
    tokens = random_prompt(150, 3)
    whole = teacher_forced(executor, tokens)
    for sizes in ((1,), (2, 3, 5), (64,), (100, 1)):
        assert torch.equal(in_chunks(executor, tokens, sizes, has_all_blocks=True), whole), sizes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_batch_invariant_tokens_are_the_same_in_company(tiny: TinyModels, dtype: str) -> None:
    """In company graphs are padded to their next size, and prompts share steps with decodes."""
    executor = tiny("llama", dtype).executor(device="cuda", batch_invariant=True, num_blocks=128)
    prompts = [random_prompt(length, seed) for seed, length in enumerate((150, 1, 17, 80, 33, 2, 64))]
    alone = [generate(executor, [prompt], _OUTPUTS)[0] for prompt in prompts]
    assert generate(executor, prompts, _OUTPUTS, chunk=32, stagger=2, chained=True) == alone
