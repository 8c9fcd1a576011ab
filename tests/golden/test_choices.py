"""Choice i of n is what a request of its own draws with the same seed and choice, however the n are computed.

Tiny models in float64: token-identical over the product of the knobs, where choices share a prompt, its hand-off and
its last block.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tandem.core.events import Cancelled, Finished, JobEvent
from tandem.core.ids import JobKey, RequestId
from tandem.core.request import Request, SamplingParams
from tests.covering import covering
from tests.golden.cluster import Cluster, Knobs, Node, Outcome, can_guess, executors_for
from tests.golden.conftest import TinyModels
from tests.golden.guesses import Method
from tests.golden.models import Reference, check_sampled, random_prompt

_OUTPUTS = 20
_NUM_CHOICES = 4
# So warm that no two choices are alike, so cold that guesses are right now and then.
_SAMPLED = SamplingParams(max_tokens=_OUTPUTS, temperature=0.8, seed=11)
_SPECULATION: tuple[Method, ...] = ("off", "mixed")
_PRODUCT = [
    Knobs(chunk=chunk, block_size=block, plan_depth=depth, remote=remote, prefix_hit=hit, preempt=preempt,
          speculation=speculation)
    for speculation, chunk, block, depth, remote, hit, preempt in itertools.product(
        _SPECULATION, (16, None), (8, 16), (1, 2), (False, True), (False, True), (False, True)
    )
    if speculation == "off" or can_guess(depth, remote)
]  # fmt: skip


class Choices(Cluster):
    """A cluster whose requests ask for several choices; the outcome of each goes by `name/choice`."""

    def run_choices(self, prompt: Sequence[int], sampling: SamplingParams, choices: range) -> list[Outcome]:
        """One request for neighbouring choices, without waiting for its end."""
        name = RequestId(f"r{next(self._ids)}")
        request = Request(id=name, model="m", prompt_tokens=tuple(prompt), sampling=sampling)
        for choice in choices:
            self.outcomes[_of(name, choice)] = Outcome()
        self.place_request(request, choice=choices[0], num_choices=len(choices))
        return [self.outcomes[_of(name, choice)] for choice in choices]

    def end(self, name: RequestId, choice: int) -> None:
        """The client has enough of one choice."""
        for node in self.nodes:
            self._carry_out(node, node.engine.cancel(JobKey(name, 1, choice), self.clock.now()))

    def cancel(self, name: RequestId) -> None:
        request, _, choice = name.partition("/")
        self.end(RequestId(request), int(choice or 0))

    def _take(self, node: Node, event: JobEvent) -> None:
        if event.key.request in self.outcomes:
            super()._take(node, event)
            return
        super()._take(node, replace(event, key=JobKey(_of(event.key.request, event.key.choice), event.key.attempt)))


def _of(name: RequestId, choice: int) -> RequestId:
    return RequestId(f"{name}/{choice}")


# One that fills its last block under either block size, and one that does not.
_PROMPTS = (random_prompt(32, 32), random_prompt(45, 45))


def _cluster(reference: Reference, knobs: Knobs, prompt: Sequence[int], right: Sequence[Sequence[int]]) -> Choices:
    """With `preempt` only one choice finds room for its whole output, so that the others give way."""
    one, shared = -(-(len(prompt) + _OUTPUTS) // knobs.block_size), len(prompt) // knobs.block_size
    needed = _NUM_CHOICES * (one - shared) + shared
    tight = max(one + 1, needed - 2)
    answers = [[*prompt, *output] for output in right]
    return Choices(executors_for(reference, knobs, 3 * needed, tight if knobs.preempt else None), knobs, answers)


def _alone(reference: Reference, prompt: Sequence[int], sampling: SamplingParams) -> list[list[int]]:
    knobs = Knobs()
    out = []
    for choice in range(_NUM_CHOICES):
        with _cluster(reference, knobs, prompt, ()) as cluster:
            (outcome,) = cluster.run_choices(prompt, sampling, range(choice, choice + 1))
            cluster.run()
            out.append(outcome.ids)
    return out


def _check(reference: Reference, product: Sequence[Knobs]) -> None:
    wrong, num_preempted = [], 0
    for prompt in _PROMPTS:
        right = _alone(reference, prompt, _SAMPLED)
        assert len(set(map(tuple, right))) == _NUM_CHOICES, "choices differ"
        for knobs in product:
            with _cluster(reference, knobs, prompt, right) as cluster:
                if knobs.prefix_hit:
                    cluster.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0))
                    cluster.run()
                outcomes = cluster.run_choices(prompt, _SAMPLED, range(_NUM_CHOICES))
                cluster.run()
                assert all(isinstance(outcome.end, Finished) for outcome in outcomes), knobs
                num_preempted += cluster.consumer.engine.num_preempted
                if [outcome.ids for outcome in outcomes] != right:
                    wrong.append(str(knobs))
    assert not wrong, wrong
    assert num_preempted > 0 or not any(knobs.preempt for knobs in product), "nobody gave way"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_each_choice_is_that_of_a_request_of_its_own_over_the_product(tiny: TinyModels) -> None:
    _check(tiny("llama", "float64"), _PRODUCT)


def test_each_choice_is_that_of_a_request_of_its_own(tiny: TinyModels) -> None:
    _check(tiny("llama", "float64"), covering(_PRODUCT))


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("ended", [0, 1, 3])
def test_the_end_of_one_choice_changes_no_other(tiny: TinyModels, remote: bool, ended: int) -> None:
    reference, prompt = tiny("llama", "float64"), _PROMPTS[1]
    right = _alone(reference, prompt, _SAMPLED)
    for num_steps in (0, 2, 4, 9):
        with _cluster(reference, Knobs(remote=remote, chunk=16), prompt, ()) as cluster:
            outcomes = cluster.run_choices(prompt, _SAMPLED, range(_NUM_CHOICES))
            for _ in range(num_steps):
                cluster.step()
            cluster.end(RequestId("r0"), ended)
            cluster.run()
            assert isinstance(outcomes[ended].end, Cancelled)
            assert outcomes[ended].ids == right[ended][: len(outcomes[ended].ids)]
            others = [i for i in range(_NUM_CHOICES) if i != ended]
            assert [outcomes[i].ids for i in others] == [right[i] for i in others]


def test_the_prompt_is_computed_and_moved_once(tiny: TinyModels) -> None:
    reference, prompt = tiny("llama", "float64"), _PROMPTS[1]
    with _cluster(reference, Knobs(remote=True), prompt, ()) as cluster:
        outcomes = cluster.run_choices(prompt, _SAMPLED, range(_NUM_CHOICES))
        cluster.run()
        pulls = [outcome.pulled for outcome in outcomes if outcome.pulled is not None]
        assert [pull.num_blocks for pull in pulls] == [-(-len(prompt) // 16)]
        assert [outcome.first_from for outcome in outcomes] == ["p"] * _NUM_CHOICES


def test_choices_of_one_temperature_zero_are_all_alike(tiny: TinyModels) -> None:
    reference, prompt = tiny("llama", "float64"), _PROMPTS[0]
    greedy = SamplingParams(max_tokens=_OUTPUTS, temperature=0.0)
    with _cluster(reference, Knobs(remote=True), prompt, ()) as cluster:
        outcomes = cluster.run_choices(prompt, greedy, range(_NUM_CHOICES))
        cluster.run()
        assert [outcome.ids for outcome in outcomes] == [reference.greedy(prompt, _OUTPUTS)] * _NUM_CHOICES


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_the_real_model_samples_each_choice_as_if_it_ran_alone(real: Reference) -> None:
    """In float32, whole and split, with a last block that all of them share at first; tight, so that some give way."""
    prompt = [1, *range(1000, 1040)]
    alone = _alone(real, prompt, _SAMPLED)
    assert len(set(map(tuple, alone))) == _NUM_CHOICES
    check_sampled(real, prompt, alone[0], _SAMPLED)
    for knobs in (Knobs(), Knobs(remote=True), Knobs(chunk=16, plan_depth=2, preempt=True), Knobs(speculation="ngram")):
        with _cluster(real, knobs, prompt, alone) as cluster:
            outcomes = cluster.run_choices(prompt, _SAMPLED, range(_NUM_CHOICES))
            cluster.run()
            assert [outcome.ids for outcome in outcomes] == alone, knobs
            assert cluster.consumer.engine.is_idle and cluster.producer.engine.num_live == 0
