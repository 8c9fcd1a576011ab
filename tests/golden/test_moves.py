"""A choice that moves to another worker in mid-flight goes on exactly, however it is drawn and whenever it moves.

Tiny models in float64: token-identical, and with the same log probabilities, to what one worker draws alone.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.core.request import SamplingParams
from tests.golden.cluster import Knobs, can_guess
from tests.golden.conftest import TinyModels
from tests.golden.models import TINY_VOCAB, Reference
from tests.golden.movers import Movers, Story

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


def _prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(TINY_VOCAB) for _ in range(length)]


_PROMPTS = tuple(map(_prompt, (3, 41, 96)))


def _movers(reference: Reference, knobs: Knobs, num_nodes: int = 2, num_blocks: int = 160) -> Movers:
    return Movers(
        [reference.executor(block_size=knobs.block_size, num_blocks=num_blocks) for _ in range(num_nodes)], knobs
    )


def _alone(reference: Reference, sampling: SamplingParams, num_choices: int = 1) -> list[list[object]]:
    """What one worker draws of each choice of each prompt."""
    with _movers(reference, Knobs(), 1) as movers:
        stories = [story for prompt in _PROMPTS for story in movers.begin(prompt, sampling, num_choices)]
        movers.run()
    return [list(story.tokens) for story in stories]


def _moved(reference: Reference, knobs: Knobs, sampling: SamplingParams, at: int, num_choices: int = 1) -> list[Story]:
    """All prompts, begun at the first of two nodes, which drains from step `at` on until all has gone."""
    with _movers(reference, knobs) as movers:
        stories = [story for prompt in _PROMPTS for story in movers.begin(prompt, sampling, num_choices)]
        for _ in range(at):
            movers.step()
        movers.evacuate(movers.nodes[0])
        movers.run()
        books = [node.engine.books() for node in movers.nodes]
    assert all(b.num_free_blocks == b.num_blocks and not b.num_leases and not b.num_pulls for b in books)
    assert all(story.end is not None and not story.open for story in stories)
    return stories


def _drawn(stories: Sequence[Story]) -> list[list[object]]:
    return [list(story.tokens) for story in stories]


@pytest.mark.parametrize("sampling", [_GREEDY, _SAMPLED, _PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("knobs", _PRODUCT, ids=str)
def test_what_moves_goes_on_exactly(tiny: TinyModels, knobs: Knobs, sampling: SamplingParams) -> None:
    reference = tiny("llama", "float64")
    right = _alone(reference, sampling)
    for at in (3, 14, 22):
        assert _drawn(_moved(reference, knobs, sampling, at)) == right, at
