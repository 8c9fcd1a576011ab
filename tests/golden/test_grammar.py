"""Test that structured output is what transformers' logits and the grammar give, however a request is computed."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem.core.bundle import TokenizerBundle
from tandem.core.events import Finished, FinishReason, SampledToken
from tandem.core.grammar import Grammar
from tandem.core.ids import RequestId, SeqId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.runtime.grammar_engine import LlguidanceMasks
from tandem.runtime.model_config import read_model_config
from tandem.runtime.model_loader import AnyExecutor
from tandem.runtime.sampler import filters_of
from tandem_kernels.reference.philox import uniform
from tandem_kernels.reference.sample import kept_tokens
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, Outcome, can_guess, executors_with_room
from tests.golden.conftest import TinyModels
from tests.golden.migrations import MigratingCluster
from tests.golden.models import NEAR_TIE, TINY_VOCAB, Reference
from tests.golden.test_choices import Choices
from tests.golden.test_same_answer import _PROMPTS, _RIVALS

_OUTPUTS = 30
_ENDLESS = Grammar("regex", r"([a-z]{2,9} [0-9]{3}\. )+")
_END = 0


def _bundle(ends: Sequence[int]) -> TokenizerBundle:
    """Of fewer tokens than the models draw from; several spell the same text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [*string.ascii_letters, *string.digits, *string.punctuation, "Ġ"]
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB - 20, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(["the weather in some town is 123. 456. 789 degrees"] * 9, trainer)
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(), special_tokens_json=json.dumps({"eos_token_ids": ends})
    )


@pytest.fixture(scope="module")
def bundle() -> TokenizerBundle:
    return _bundle([_END])


@pytest.fixture(scope="module")
def endless() -> TokenizerBundle:
    """No token ends a sequence."""
    return _bundle([])


@pytest.fixture(scope="module")
def masked(tiny: TinyModels, bundle: TokenizerBundle) -> Callable[[bool, float], list[list[int]]]:
    """What is right for `_RIVALS` or `_PROMPTS`, at a temperature."""

    @cache
    def outputs(rivals: bool, temperature: float) -> list[list[int]]:
        reference, masks = tiny("llama", "float64"), LlguidanceMasks(bundle, TINY_VOCAB)
        params = SamplingParams(max_tokens=_OUTPUTS, temperature=temperature, seed=3, grammar=_ENDLESS)
        return [_masked(reference, masks, prompt, params) for prompt in (_RIVALS if rivals else _PROMPTS)]

    return outputs


def _masked(
    reference: Reference, masks: LlguidanceMasks, prompt: Sequence[int], params: SamplingParams, choice: int = 0
) -> list[int]:
    """What transformers' logits, a mask made anew for each token, and a draw by the book say."""
    assert params.grammar is not None
    output: list[int] = []
    while len(output) < params.max_tokens and not (output and output[-1] in params.stop_token_ids):
        row = reference.logits([*prompt, *output])[-1].to(torch.float64).clone()
        masks.retain([])
        allowed = masks.allowed(SeqId(0), params.grammar, output, params.stop_token_ids)
        if not allowed.any():
            break
        row[~allowed] = -torch.inf
        if params.temperature == 0:
            output.append(int(row.argmax()))
            continue
        kept = kept_tokens(row, filters_of(params))
        shares = torch.softmax(row[kept] / params.temperature, 0).cumsum(0)
        output.append(int(kept[int((shares <= uniform(params.seed, choice, len(output))).sum())]))
    return output


def _executors(reference: Reference, bundle: TokenizerBundle, knobs: Knobs, num_blocks: int) -> list[AnyExecutor]:
    """One for each node; only the last one has few blocks."""
    return [
        reference.executor(
            block_size=knobs.block_size,
            num_blocks=num_blocks if place == knobs.remote else 64,
            grammars=LlguidanceMasks(bundle, TINY_VOCAB),
        )
        for place in range(1 + knobs.remote)
    ]


_PRODUCT = [
    Knobs(
        chunk=chunk, plan_depth=depth, remote=remote, prefix_hit=hit, company=True, preempt=preempt, speculation=guesses
    )
    for guesses, chunk, depth, remote, hit, preempt in itertools.product(
        ("off", "mixed"), (16, None), (1, 2), (False, True), (False, True), (False, True)
    )
    if guesses == "off" or can_guess(depth, remote)
]


_CASES = covering(list(itertools.product(_PRODUCT, (0.0, 1.5))))


@pytest.mark.parametrize(("knobs", "temperature"), _CASES, ids=str)
def test_the_same_tokens_however_computed(
    tiny: TinyModels,
    bundle: TokenizerBundle,
    masked: Callable[[bool, float], list[list[int]]],
    knobs: Knobs,
    temperature: float,
) -> None:
    reference = tiny("llama", "float64")
    params = SamplingParams(max_tokens=_OUTPUTS, temperature=temperature, seed=3, grammar=_ENDLESS)
    prompts = _RIVALS if knobs.preempt else _PROMPTS
    right = masked(knobs.preempt, temperature)
    needed = sum(-(-(len(prompt) + _OUTPUTS) // knobs.block_size) for prompt in prompts)
    executors = _executors(reference, bundle, knobs, needed - 1 if knobs.preempt else 2 * needed)
    answers = [[*prompt, *output] for prompt, output in zip(prompts, right, strict=True)]
    with Cluster(executors, knobs, answers) as cluster:
        assert [outcome.ids for outcome in cluster.run_requests(prompts, params)] == right


@pytest.mark.parametrize(
    "knobs", [Knobs(), Knobs(block_size=4, plan_depth=2), Knobs(block_size=4, speculation="ngram")], ids=str
)
def test_choices_that_move_stay_within_their_grammar(tiny: TinyModels, bundle: TokenizerBundle, knobs: Knobs) -> None:
    """Whoever takes a choice builds its state anew, from the tokens that it is told."""
    reference, prompt = tiny("llama", "float64"), _PROMPTS[1]
    params = SamplingParams(max_tokens=_OUTPUTS, temperature=1.1, seed=5, grammar=_ENDLESS)
    masks = LlguidanceMasks(bundle, TINY_VOCAB)
    right = [_masked(reference, masks, prompt, params, choice) for choice in range(3)]
    for num_steps in (2, 9, 17):
        executors = [
            reference.executor(
                block_size=knobs.block_size, num_blocks=160, grammars=LlguidanceMasks(bundle, TINY_VOCAB)
            )
            for _ in range(2)
        ]
        with MigratingCluster(executors, knobs) as cluster:
            stories = cluster.begin(prompt, params, len(right))
            for _ in range(num_steps):
                cluster.step()
            cluster.start_drain(cluster.nodes[0])
            cluster.run()
        assert [story.ids for story in stories] == right
        assert all(story.num_moved == 1 and not story.num_recomputed for story in stories), num_steps


@pytest.mark.parametrize("num_known", [1, 7, 29])
def test_another_worker_goes_on_where_one_was_lost(tiny: TinyModels, bundle: TokenizerBundle, num_known: int) -> None:
    reference = tiny("qwen3", "float64")
    params = SamplingParams(max_tokens=_OUTPUTS, temperature=0.9, seed=8, grammar=_ENDLESS)
    prompt = _PROMPTS[1]
    right = _masked(reference, LlguidanceMasks(bundle, TINY_VOCAB), prompt, params)
    knobs = Knobs()
    with Cluster(_executors(reference, bundle, knobs, 64), knobs) as cluster:
        request = Request(id=RequestId("r"), model="m", prompt_tokens=tuple(prompt), sampling=params)
        known = tuple(right[:num_known])
        outcome = cluster.outcomes[request.id] = Outcome(tokens=[SampledToken(token) for token in known])
        job = GenerateJob(request=request, attempt=2, output_tokens=known)
        cluster.place(cluster.consumer, job)
        cluster.run()
        assert outcome.ids == right
        assert isinstance(outcome.end, Finished)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_grammar_that_is_complete_ends_the_request(tiny: TinyModels, bundle: TokenizerBundle, ignored: bool) -> None:
    """Where ends are ignored it goes on while it may, and then ends all the same."""
    reference = tiny("llama", "float64")
    least = 64 if ignored else 0
    params = SamplingParams(
        max_tokens=64,
        temperature=1.0,
        seed=2,
        stop_token_ids=frozenset({_END}),
        min_tokens=least,
        grammar=Grammar("regex", "[a-z]{3,30}"),
    )
    knobs = Knobs(remote=True)
    with Cluster(_executors(reference, bundle, knobs, 64), knobs) as cluster:
        name = cluster.submit(_PROMPTS[0], params)
        cluster.run()
        outcome = cluster.outcomes[name]
    assert isinstance(outcome.end, Finished)
    assert outcome.end.reason is FinishReason.STOP
    assert outcome.ids[-1] == _END
    text = Tokenizer.from_buffer(bundle.tokenizer_json).decode(outcome.ids[:-1])
    assert len(text) == 30 if ignored else 3 <= len(text) <= 30


_SHORT = SamplingParams(max_tokens=_OUTPUTS, temperature=1.5, seed=5, grammar=Grammar("regex", "[a-z]{9,25}"))
_NOTHING = replace(_SHORT, grammar=Grammar("regex", ""))
_KNOBS = [
    Knobs(chunk=16, plan_depth=depth, remote=remote, preempt=preempt, speculation=guesses)
    for guesses, depth, remote, preempt in itertools.product(("off", "mixed"), (1, 2), (False, True), (False, True))
    if guesses == "off" or can_guess(depth, remote)
]


def _few_blocks(knobs: Knobs, num_choices: int) -> int:
    """Enough for one choice alone."""
    one = -(-(len(_PROMPTS[1]) + _OUTPUTS) // knobs.block_size)
    return one if knobs.preempt else num_choices * one


@pytest.mark.parametrize("knobs", covering(_KNOBS), ids=str)
def test_a_complete_output_ends_without_a_free_token_for_the_end(
    tiny: TinyModels, endless: TokenizerBundle, knobs: Knobs
) -> None:
    """Each choice by itself, with the tokens that it has; where nothing may come at all, at once."""
    reference, prompt = tiny("llama", "float64"), _PROMPTS[1]
    right = [_masked(reference, LlguidanceMasks(endless, TINY_VOCAB), prompt, _SHORT, choice) for choice in range(3)]
    assert len(set(map(len, right))) > 1 and max(map(len, right)) < _OUTPUTS
    executors = _executors(reference, endless, knobs, _few_blocks(knobs, 3))
    with Choices(executors, knobs, [[*prompt, *output] for output in right]) as cluster:
        outcomes = cluster.run_choices(prompt, _SHORT, range(3))
        cluster.run()
        nothing = []
        for num_choices in (2, 1):
            nothing += cluster.run_choices(prompt, _NOTHING, range(num_choices))
            cluster.run()
        assert (cluster.consumer.engine.num_preempted > 0) == knobs.preempt and cluster.consumer.engine.is_idle
    assert [outcome.ids for outcome in outcomes] == right and not any(outcome.ids for outcome in nothing)
    for outcome in (*outcomes, *nothing):
        assert isinstance(outcome.end, Finished) and outcome.end.reason is FinishReason.STOP
        assert outcome.end.num_output_tokens == len(outcome.ids)


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(tiny: TinyModels, bundle: TokenizerBundle) -> None:
    reference = tiny("llama", "float64")
    knobs = Knobs()
    bad = SamplingParams(max_tokens=4, temperature=0.0, grammar=Grammar("regex", "("))
    good = SamplingParams(max_tokens=4, temperature=0.0, grammar=_ENDLESS)
    with Cluster(_executors(reference, bundle, knobs, 64), knobs) as cluster:
        names = [cluster.submit(prompt, params) for prompt, params in zip(_RIVALS, (bad, good), strict=True)]
        cluster.run()
        ends = [cluster.outcomes[name].end for name in names]
    assert "unclosed group" in getattr(ends[0], "message", "")
    assert isinstance(ends[1], Finished)


_REAL = (
    Knobs(chunk=None, company=False),
    Knobs(chunk=16, company=True, remote=True),
    Knobs(chunk=64, company=True, speculation="ngram"),
    Knobs(chunk=64, company=True, preempt=True, plan_depth=2),
)


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_the_real_model_gives_equal_outputs_in_every_mode(
    real: Reference, real_bundle: TokenizerBundle, tokenizer: Tokenizer
) -> None:
    """Objects of a schema, greedy and drawn, to the same bits; each is what transformers' logits and the masks say, but
    for near-ties."""
    schema = {"type": "object", "properties": {"facts": {"type": "array", "items": {"type": "string"}, "minItems": 9}}}
    grammar = Grammar("json_schema", json.dumps({**schema, "required": ["facts"]}))
    texts = [f"<|im_start|>user\nFacts on {it} as JSON.<|im_end|>\n<|im_start|>assistant\n" for it in ("Lyon", "cats")]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    masks = LlguidanceMasks(real_bundle, read_model_config(real.directory).vocab_size)
    for params in (
        SamplingParams(max_tokens=40, temperature=0.0, grammar=grammar),
        SamplingParams(max_tokens=40, temperature=0.8, seed=6, grammar=grammar),
    ):
        outputs = []
        for knobs in _REAL:
            executors = executors_with_room(real, knobs, prompts, params.max_tokens, grammars=masks)
            with Cluster(executors, knobs) as cluster:
                outputs.append([outcome.ids for outcome in cluster.run_requests(prompts, params)])
        assert outputs == [outputs[0]] * len(_REAL)
        for prompt, output in zip(prompts, outputs[0], strict=True):
            rows = real.last_logits([*prompt, *output[:-1]], len(output)).to(torch.float64).clone()
            for place, (row, token) in enumerate(zip(rows, output, strict=True)):
                row[~masks.allowed(SeqId(-1), grammar, output[:place], frozenset())] = -torch.inf
                if params.temperature == 0:
                    assert float(row.max() - row[token]) < NEAR_TIE
                    continue
                shares = torch.softmax(row / params.temperature, 0).cumsum(0)
                before = float(shares[token - 1]) if token else 0.0
                assert before - NEAR_TIE < uniform(params.seed, 0, place) < float(shares[token]) + NEAR_TIE
