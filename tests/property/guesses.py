"""Propose draft tokens that the model of tests/property/model.py will sample, a set part of them wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random

from tandem.core.request import Job
from tandem.sched.phases.spec_decode import Speculation
from tests.property.model import VOCABULARY, chain, chain_of, sample_token


class Guesser:
    """A `Proposer` of too few, too many, right and wrong guesses. `right`: the share that is true."""

    def __init__(self, jobs: Callable[[], Iterable[Job]], seed: int, right: float) -> None:
        self._jobs = jobs
        self._random = Random(seed)
        self._right = right

    def propose(self, tokens: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        known = list(tokens)
        parts = (job.for_choice(key.choice) for job in self._jobs() for key in job.keys)
        job = next((job for job in parts if _is_of(job, known)), None)
        value = chain_of(known)
        for _ in range(self._random.randint(0, max_tokens + 1)):
            guess = self._random.randrange(VOCABULARY)
            if job is not None and self._random.random() < self._right:
                guess = sample_token(
                    value, job.request.sampling, job.choice, len(known) - len(job.request.prompt_tokens)
                )
            value = chain(value, len(known), guess)
            known.append(guess)
        return tuple(known[len(tokens) :])


def _is_of(job: Job, known: Sequence[int]) -> bool:
    """Whether the tokens are the job's so far."""
    start = [*job.request.prompt_tokens, *job.output_tokens]
    if list(known[: len(start)]) != start:
        return False
    value = chain_of(start)
    for position in range(len(start), len(known)):
        index = position - len(job.request.prompt_tokens)
        if known[position] != sample_token(value, job.request.sampling, job.choice, index):
            return False
        value = chain(value, position, known[position])
    return True


def speculation(jobs: Callable[[], Iterable[Job]], seed: int, right: float | None) -> Speculation | None:
    """Few rows and few guesses, so that the bounds matter; None where `right` is."""
    if right is None:
        return None
    return Speculation(lambda: Guesser(jobs, seed, right), num_tokens=1 + seed % 5, max_batch_tokens=2 + seed % 7)
