"""A choice that moves to another worker in mid-flight goes on exactly, however it is drawn and whenever it moves.

Tiny models in float64: token-identical, and with the same log probabilities, to what one worker draws alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from tandem.core.request import SamplingParams
from tests.covering import covering
from tests.golden.cluster import Knobs, can_guess, executors_for
from tests.golden.conftest import TinyModels
from tests.golden.migrations import MigratingCluster, Story
from tests.golden.models import Reference, random_prompt

_OUTPUTS = 30
_GREEDY = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)
_SAMPLED = SamplingParams(max_tokens=_OUTPUTS, temperature=1.3, top_p=0.95, top_k=50, seed=11)
_PENALISED = replace(_SAMPLED, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
_SCORED = replace(_SAMPLED, logprobs=3)
_PRODUCT = [
    Knobs(chunk=chunk, block_size=block, plan_depth=depth, speculation=speculation)
    for chunk, block, depth, speculation in itertools.product((16, None), (4, 16), (1, 2), ("off", "mixed"))
    if speculation == "off" or can_guess(depth, False)
]


_PROMPTS = tuple(random_prompt(length, length) for length in (3, 41, 96))


def _cluster(
    reference: Reference, knobs: Knobs, num_nodes: int = 2, answers: Sequence[Sequence[int]] = ()
) -> MigratingCluster:
    return MigratingCluster(executors_for(reference, knobs, 160, num_nodes=num_nodes), knobs, answers)


@cache
def _alone(reference: Reference, sampling: SamplingParams, num_choices: int = 1) -> list[list[object]]:
    """What one worker draws of each choice of each prompt."""
    with _cluster(reference, Knobs(), 1) as cluster:
        stories = [story for prompt in _PROMPTS for story in cluster.begin(prompt, sampling, num_choices)]
        cluster.run()
    return _outputs(stories)


def _moved(
    reference: Reference,
    knobs: Knobs,
    sampling: SamplingParams,
    at: int,
    num_choices: int = 1,
    answers: Sequence[Sequence[int]] = (),
) -> list[Story]:
    """All prompts, begun at the first of two nodes, which drains from step `at` on until all has gone."""
    with _cluster(reference, knobs, 2, answers) as cluster:
        stories = [story for prompt in _PROMPTS for story in cluster.begin(prompt, sampling, num_choices)]
        for _ in range(at):
            cluster.step()
        cluster.start_drain(cluster.nodes[0])
        cluster.run()
        books = [node.engine.books() for node in cluster.nodes]
    assert all(b.num_free_blocks == b.num_blocks and not b.num_leases and not b.num_pulls for b in books)
    assert all(story.end is not None and not story.open for story in stories)
    return stories


def _outputs(stories: Sequence[Story]) -> list[list[object]]:
    return [list(story.tokens) for story in stories]


_KINDS = {"greedy": _GREEDY, "sampled": _SAMPLED, "penalised": _PENALISED}
_CASES = list(itertools.product([*_PRODUCT, Knobs(block_size=4, plan_depth=2, on_device=True)], _KINDS, (3, 14, 22)))


def _check(reference: Reference, knobs: Knobs, kind: str, at: int) -> None:
    assert _outputs(_moved(reference, knobs, _KINDS[kind], at)) == _alone(reference, _KINDS[kind])


@pytest.mark.parametrize(("knobs", "kind", "at"), covering(_CASES), ids=str)
def test_what_moves_goes_on_exactly(tiny: TinyModels, knobs: Knobs, kind: str, at: int) -> None:
    _check(tiny("llama", "float64"), knobs, kind, at)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_what_moves_goes_on_exactly_over_the_product(tiny: TinyModels) -> None:
    for case in _CASES:
        _check(tiny("llama", "float64"), *case)


def test_every_choice_moves_by_itself(tiny: TinyModels) -> None:
    """They share the prompt's blocks, and its last one until each has written on."""
    reference = tiny("llama", "float64")
    right = _alone(reference, _SAMPLED, 3)
    for knobs, at in ((Knobs(block_size=16), 2), (Knobs(block_size=4, plan_depth=2), 3), (Knobs(), 12)):
        stories = _moved(reference, knobs, _SAMPLED, at, 3)
        assert _outputs(stories) == right
        assert all(story.num_moved == 1 and not story.num_recomputed for story in stories), knobs


def test_log_probabilities_move_along(tiny: TinyModels) -> None:
    reference = tiny("llama", "float64")
    right = _alone(reference, _SCORED)
    stories = _moved(reference, Knobs(block_size=4), _SCORED, 12)
    assert [story.ids for story in stories] == [[token.id for token in tokens] for tokens in right]
    for story, tokens in zip(stories, right, strict=True):
        for mine, theirs in zip(story.tokens, tokens, strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-9)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


@pytest.mark.parametrize("right_guesses", [False, True])
def test_what_guesses_moves_exactly(tiny: TinyModels, right_guesses: bool) -> None:
    reference = tiny("llama", "float64")
    knobs = Knobs(block_size=4, speculation="mixed" if right_guesses else "ngram")
    right = _alone(reference, _GREEDY)
    answers = [[*prompt, *(token.id for token in tokens)] for prompt, tokens in zip(_PROMPTS, right, strict=True)]
    stories = _moved(reference, knobs, _GREEDY, 5, answers=answers)
    assert _outputs(stories) == right
    assert all(story.num_moved == 1 and not story.num_recomputed for story in stories)


def test_a_choice_moves_on_from_the_worker_that_it_moved_to(tiny: TinyModels) -> None:
    reference = tiny("llama", "float64")
    right = _alone(reference, _SAMPLED)
    with _cluster(reference, Knobs(block_size=4), 3) as cluster:
        stories = [story for prompt in _PROMPTS for story in cluster.begin(prompt, _SAMPLED)]
        for node in cluster.nodes[:2]:
            for _ in range(8):
                cluster.step()
            cluster.start_drain(node)
        cluster.run()
    assert _outputs(stories) == right
    assert all(story.num_moved == 2 and not story.num_recomputed for story in stories)


def test_a_sequence_whose_consumer_is_lost_thaws_and_is_offered_anew(tiny: TinyModels) -> None:
    """Lost at every stage: while it reads, when all was handed over, and before it heard anything."""
    reference = tiny("llama", "float64")
    right = _alone(reference, _SAMPLED)
    for seed in range(6):
        rng = random.Random(seed)
        with _cluster(reference, Knobs(block_size=4, plan_depth=1 + seed % 2)) as cluster:
            stories = [story for prompt in _PROMPTS for story in cluster.begin(prompt, _SAMPLED)]
            for _ in range(5):
                cluster.step()
            cluster.start_drain(cluster.nodes[0])
            for _ in range(12):
                cluster.hold = rng.random() < 0.7
                cluster.step()
                if rng.random() < 0.5:
                    cluster.abandon(rng.choice(stories))
            cluster.hold = False
            cluster.run()
            assert cluster.nodes[0].engine.is_idle
        assert _outputs(stories) == right, seed
        assert not any(story.num_recomputed for story in stories), seed


def test_without_room_at_the_consumer_the_producer_goes_on(tiny: TinyModels) -> None:
    """Each consumer in turn is too small for what is drawn while it moves; in the end the sequence ends where it
    began."""
    reference = tiny("llama", "float64")
    right = _alone(reference, _GREEDY)[2]
    executors = [reference.executor(block_size=4, num_blocks=blocks) for blocks in (64, 32)]
    with MigratingCluster(executors, Knobs(block_size=4)) as cluster:
        (story,) = cluster.begin(_PROMPTS[2], _GREEDY)
        rival = cluster.nodes[1]
        for _ in range(8):
            cluster.step()
        cluster.start_drain(cluster.nodes[0])
        cluster.hold = True
        cluster.answer()
        for _ in range(3):
            cluster.step()
        cluster.hold = False
        cluster.run()
        assert rival.engine.is_idle
    assert list(story.tokens) == right
