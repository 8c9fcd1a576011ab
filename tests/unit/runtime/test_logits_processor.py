"""Test adjusted logits against a plain computation and transformers' processors; order, memory, refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tandem.core.grammar import Grammar
from tandem.core.ids import SeqId
from tandem.core.request import SamplingParams
from tandem.runtime.logits_processor import GrammarExhausted, LogitsProcessor
from tandem.runtime.sampler import LogitRows
from tandem.sched.state.step_plan import Sampling

_VOCAB = 40
_SEQ = SeqId(3)
_PROMPT = (1, 2, 3, 2, 30)
_OUTPUT = (5, 6, 5, 2, 5)
_GRAMMAR = Grammar("regex", "a*")


def _params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 99, "temperature": 0.0} | fields))


def _logits(seed: int = 0) -> torch.Tensor:
    return torch.randn(_VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


def _sampling(params: SamplingParams, output: tuple[int, ...] = _OUTPUT) -> Sampling:
    return Sampling(params, 0, len(output), _PROMPT, output)


def _adjusted(
    params: SamplingParams, logits: torch.Tensor, adjuster: LogitsProcessor | None = None, sampled: Sequence[int] = ()
) -> list[float]:
    adjust = (adjuster or LogitsProcessor()).adjust(_SEQ, _sampling(params))
    row = logits.clone()
    if adjust is not None:
        adjust(row, sampled)
    return [float(value) for value in row]


def _plainly(params: SamplingParams, logits: torch.Tensor, output: Sequence[int]) -> list[float]:
    """Compute the adjusted logits token by token, as the documentation of `SamplingParams` defines them."""
    row = [float(value) for value in logits]
    for token in {*_PROMPT, *output}:
        row[token] *= params.repetition_penalty if row[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        row[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, bias in params.logit_bias:
        row[token] += bias
    for token in params.stop_token_ids if len(output) < params.min_tokens else ():
        row[token] = -math.inf
    return row


class Even:
    """Grammar masks that allow even tokens, and stop ids only after `length` tokens."""

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self.outputs: list[tuple[int, ...]] = []
        self.retained: set[SeqId] = set()

    def allowed(self, seq: SeqId, grammar: Grammar, output: Sequence[int], stop_ids: frozenset[int]) -> torch.Tensor:
        self.outputs.append(tuple(output))
        mask = torch.arange(_VOCAB) % 2 == 0
        if len(output) >= self.length:
            mask[:] = False
            mask[list(stop_ids)] = True
        return mask

    def retain(self, seqs: Collection[SeqId]) -> None:
        self.retained = set(seqs)


_KNOBS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "less repetition": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": -0.7},
    "bias": {"logit_bias": ((2, 5.0), (7, -100.0))},
    "min": {"min_tokens": 6, "stop_token_ids": frozenset({0, 9})},
}
_ALL = {name: value for knob in _KNOBS.values() for name, value in knob.items()}


@pytest.mark.parametrize("fields", [*_KNOBS.values(), _ALL], ids=[*_KNOBS, "all"])
def test_logits_are_modified_as_the_parameters_specify(fields: dict[str, Any]) -> None:
    params, logits = _params(**fields), _logits()
    assert _adjusted(params, logits) == pytest.approx(_plainly(params, logits, _OUTPUT), abs=1e-12)
    assert _adjusted(params, logits) != logits.tolist()


def test_without_a_knob_nothing_is_changed() -> None:
    assert LogitsProcessor().adjust(_SEQ, _sampling(_params(stop_token_ids=frozenset({4}), min_tokens=5))) is None


def test_order_and_meaning_are_those_of_transformers() -> None:
    params = _params(
        repetition_penalty=1.4, logit_bias=((2, 3.0), (8, -4.0)), min_tokens=9, stop_token_ids=frozenset({3, 11})
    )
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.4),
            SequenceBiasLogitsProcessor([[[2], 3.0], [[8], -4.0]]),
            MinNewTokensLengthLogitsProcessor(len(_PROMPT), 9, [3, 11]),
        ]
    )
    logits = _logits(1)
    expected = theirs(torch.tensor([[*_PROMPT, *_OUTPUT]]), logits[None].clone())[0]
    assert _adjusted(params, logits) == pytest.approx(expected.tolist(), abs=1e-12)


def test_what_is_remembered_changes_nothing() -> None:
    """One processor sees outputs that grow, shrink and change more freely than a scheduler would change them."""
    adjuster, rng = LogitsProcessor(), random.Random(5)
    params, logits = _params(**_ALL), _logits(2)
    for _ in range(200):
        output = tuple(rng.choices(range(_VOCAB), k=rng.choice([0, 1, 2, 90])))
        for sampled in ((), output[:1], output[:2]):
            adjust = adjuster.adjust(_SEQ, _sampling(params, output))
            assert adjust is not None
            row = logits.clone()
            adjust(row, sampled)
            assert row.tolist() == pytest.approx(_plainly(params, logits, (*output, *sampled)), abs=1e-12)
        if rng.random() < 0.1:
            adjuster.retain(rng.choice([(), (_SEQ,)]))


def test_a_sequence_id_that_is_reused_with_another_prompt() -> None:
    adjuster, params, logits = LogitsProcessor(), _params(repetition_penalty=2.0), _logits(3)
    for prompt in ((1, 2), (1, 2, 3), (4,)):
        adjust = adjuster.adjust(_SEQ, Sampling(params, 0, 0, prompt, ()))
        assert adjust is not None
        row = logits.clone()
        adjust(row, ())
        assert {i for i in range(_VOCAB) if row[i] != logits[i]} == set(prompt)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0])
def test_the_least_repetition_penalty_repeats_a_token(temperature: float) -> None:
    sampling = Sampling(_params(repetition_penalty=5e-324, temperature=temperature), 0, 0, _PROMPT, ())
    rows = torch.stack([_logits(seed).abs() + 1 for seed in range(3)])
    for row in range(3):
        assert LogitRows(rows).sample(row, sampling, (), LogitsProcessor().adjust(_SEQ, sampling)).id in _PROMPT


def test_guessed_rows_see_the_guesses_before_them() -> None:
    params = _params(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    rows = torch.stack([_logits(seed) for seed in (4, 4, 4, 4)])
    adjuster = LogitsProcessor()
    sampling = Sampling(params, 0, 0, _PROMPT, ())
    one_by_one: list[int] = []
    for i in range(4):
        single = Sampling(params, 0, i, _PROMPT, tuple(one_by_one))
        one_by_one.append(LogitRows(rows[i : i + 1]).sample(0, single, (), LogitsProcessor().adjust(_SEQ, single)).id)
    assert len(set(one_by_one)) > 1, "equal rows part by the penalties alone"
    sampled, _ = LogitRows(rows).sample_and_verify(0, sampling, one_by_one[:3], adjuster.adjust(_SEQ, sampling))
    assert [token.id for token in sampled] == one_by_one


def test_log_probabilities_are_of_the_unmodified_logits() -> None:
    logits = _logits(5)
    plain = _sampling(_params(logprobs=3))
    biased = _sampling(_params(logprobs=3, logit_bias=((12, 100.0),), repetition_penalty=1.5))
    rows = LogitRows(logits[None])
    one, other = rows.sample(0, plain), rows.sample(0, biased, (), LogitsProcessor().adjust(_SEQ, biased))
    assert other.id == 12 and other.top == one.top
    assert other.logprob == pytest.approx(float(torch.log_softmax(logits, 0)[12]), abs=1e-12)
    assert rows.sample(0, plain) == one, "the row itself is left alone"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_mask_is_applied_last_and_never_violated(temperature: float) -> None:
    masks = Even(length=99)
    params = _params(temperature=temperature, grammar=_GRAMMAR, logit_bias=((7, 100.0),), top_k=_VOCAB)
    for index in range(40):
        sampling = Sampling(params, 0, index, _PROMPT, (0,) * index)
        token = LogitRows(_logits(index)[None]).sample(0, sampling, (), LogitsProcessor(masks).adjust(_SEQ, sampling))
        assert token.id % 2 == 0
    assert masks.outputs[-1] == (0,) * 39


def test_a_grammar_sees_draft_tokens_as_output_and_which_sequences_to_keep() -> None:
    masks = Even(length=99)
    adjuster = LogitsProcessor(masks)
    params = _params(grammar=_GRAMMAR)
    rows = LogitRows(torch.stack([_logits(6)] * 3))
    adjust = adjuster.adjust(_SEQ, _sampling(params))
    best = rows.sample_and_verify(0, _sampling(params), (), adjust)[0][0].id
    sampled, _ = rows.sample_and_verify(0, _sampling(params), (best, best), adjust)
    assert [token.id for token in sampled] == [best] * 3
    assert masks.outputs[-2:] == [(*_OUTPUT, best), (*_OUTPUT, best, best)]
    adjuster.retain({_SEQ})
    assert masks.retained == {_SEQ}


@pytest.mark.parametrize("num_more", range(4))
def test_right_draft_tokens_are_sampled_before_an_output_is_complete(num_more: int) -> None:
    """Neither the last guess, which nothing may follow, nor a row that is drawn from tells more than that."""
    adjuster = LogitsProcessor(Even(length=len(_OUTPUT) + num_more))
    sampling = _sampling(_params(temperature=0.0, grammar=_GRAMMAR))
    rows = LogitRows(torch.stack([_logits(6)] * 4))
    best = int(_logits(6)[::2].argmax()) * 2
    sampled, is_complete = rows.sample_and_verify(0, sampling, (best,) * 3, adjuster.adjust(_SEQ, sampling))
    assert [token.id for token in sampled] == [best] * num_more and is_complete
    sampled, is_complete = rows.sample_and_verify(0, sampling, (best + 1,), adjuster.adjust(_SEQ, sampling))
    assert len(sampled) == min(1, num_more) and is_complete == (num_more == 0)


def test_where_a_grammar_must_end_it_does_before_min_tokens() -> None:
    params = _params(grammar=_GRAMMAR, min_tokens=50, stop_token_ids=frozenset({4, 5}))
    ended = _adjusted(params, _logits(), LogitsProcessor(Even(length=0)))
    assert {i for i, value in enumerate(ended) if value > -math.inf} == {4, 5}
    goes_on = _adjusted(params, _logits(), LogitsProcessor(Even(length=99)))
    assert {i for i, value in enumerate(goes_on) if value > -math.inf} == set(range(0, _VOCAB, 2)) - {4}


def test_stop_ids_outside_of_the_vocabulary_forbid_nothing() -> None:
    params = _params(min_tokens=50, stop_token_ids=frozenset({4, _VOCAB, 10**6}))
    row = _adjusted(params, _logits())
    assert [i for i, value in enumerate(row) if value == -math.inf] == [4]


def test_sampling_where_no_token_is_allowed_is_refused() -> None:
    params = _params(min_tokens=50, stop_token_ids=frozenset(range(_VOCAB)))
    with pytest.raises(ValueError, match="no token"):
        _adjusted(params, _logits())
    with pytest.raises(GrammarExhausted):
        _adjusted(_params(grammar=_GRAMMAR), _logits(), LogitsProcessor(Even(length=0)))
    with pytest.raises(ValueError, match="cannot follow a grammar"):
        _adjusted(_params(grammar=_GRAMMAR), _logits())


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_a_forbidden_token_is_never_sampled(number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least and the greatest random number do not select the forbidden first and last token."""
    monkeypatch.setattr("tandem.runtime.sampler.uniform", lambda seed, choice, index: number)
    stops = frozenset({0, 1, 2, _VOCAB - 2, _VOCAB - 1})
    sampling = _sampling(_params(temperature=1.0, min_tokens=50, stop_token_ids=stops))
    for seed in range(100):
        rows = LogitRows(_logits(seed)[None])
        assert rows.sample(0, sampling, (), LogitsProcessor().adjust(_SEQ, sampling)).id not in stops
