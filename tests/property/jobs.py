"""Make random jobs whose prompts share prefixes, and check what each job may report."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from tandem.core.events import FinishReason, SampledToken
from tandem.core.ids import HandoffId, Incarnation, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import GenerateJob, Job, PrefillJob, Request, ResumeJob, SamplingParams
from tests.property.model import STOP_TOKEN, VOCABULARY, expected_output, expected_scores

ELSEWHERE = WorkerRef(WorkerId("elsewhere"), Incarnation(1), "elsewhere:1")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a job is made of. Equal `branch`es share `shared` tokens, and so blocks."""

    kind: type[GenerateJob] | type[PrefillJob] | type[ResumeJob]
    length: int
    shared: int
    branch: int
    max_tokens: int
    num_output: int = 0
    priority: int = 0
    lane: Lane = Lane.INTERACTIVE
    may_stop: bool = False
    salt: str = ""
    looks_back: bool = False
    num_top: int | None = None
    num_choices: int = 1


def shapes(max_length: int, max_tokens: int) -> st.SearchStrategy[Shape]:
    return st.builds(
        Shape,
        kind=st.sampled_from([GenerateJob, GenerateJob, PrefillJob, ResumeJob]),
        length=st.integers(1, max_length),
        shared=st.integers(0, max_length),
        branch=st.integers(0, 2),
        max_tokens=st.integers(0, max_tokens),
        num_output=st.sampled_from([0, 0, 0, 1, 2]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        lane=st.sampled_from([*Lane, Lane.INTERACTIVE]),
        may_stop=st.booleans(),
        salt=st.sampled_from(["", "", "", "tenant"]),
        looks_back=st.sampled_from([False, False, True]),
        num_top=st.sampled_from([None, None, 2]),
        num_choices=st.sampled_from([1, 1, 1, 2, 3, 5]),
    )


def prompt_of(shape: Shape) -> tuple[int, ...]:
    shared = min(shape.shared, shape.length)
    return (0,) * shared + (1 + shape.branch,) * (shape.length - shared)


def request_of(shape: Shape, name: str) -> Request:
    return Request(
        id=RequestId(name),
        model="model",
        prompt_tokens=prompt_of(shape),
        priority=shape.priority,
        lane=shape.lane,
        cache_salt=shape.salt,
        prompt_logprobs=shape.num_top,
        sampling=SamplingParams(
            max_tokens=shape.max_tokens,
            seed=shape.branch,
            stop_token_ids=frozenset(range(STOP_TOKEN) if shape.may_stop else ()),
            frequency_penalty=float(shape.looks_back),
        ),
    )


def job_of(shape: Shape, name: str, attempt: int = 1) -> Job:
    request = request_of(shape, name)
    output = tuple(VOCABULARY + i for i in range(min(shape.num_output, shape.max_tokens - 1)))
    common = {"request": request, "attempt": attempt, "output_tokens": output}
    if shape.num_choices > 1:
        common |= {"choice": shape.branch, "num_choices": shape.num_choices, "output_tokens": ()}
    if shape.kind is GenerateJob:
        return GenerateJob(**common)  # type: ignore[arg-type]
    if shape.kind is PrefillJob:
        return PrefillJob(handoff=HandoffId(name), **common)  # type: ignore[arg-type]
    return ResumeJob(handoff=HandoffId(name), source=ELSEWHERE, **common)  # type: ignore[arg-type]


@dataclass(eq=False)
class Witness:
    """Checks what a job of one choice reports against the only outcome it can have."""

    job: Job
    output: list[int] = field(default_factory=list)
    num_scored: int = 0
    end: str | None = None

    def __post_init__(self) -> None:
        self.expected, self.reason = expected_output(self.job)
        self.output = list(self.job.output_tokens)

    def token(self, index: int, token: int) -> None:
        assert self.end is None, f"{self.job.key}: token {index} after its end ({self.end})"
        assert index == len(self.output), f"{self.job.key}: token {index} after {len(self.output)}"
        assert index < len(self.expected), f"{self.job.key}: token {index} after the last"
        assert token == self.expected[index], f"{self.job.key}: token {index} is {token}, not {self.expected[index]}"
        self.output.append(token)

    def scored(self, first_index: int, scores: tuple[SampledToken, ...]) -> None:
        """They may come again, but never leave a gap."""
        assert self.end is None, f"{self.job.key}: scores after its end ({self.end})"
        assert scores and 1 <= first_index <= 1 + self.num_scored, f"{self.job.key}: a gap before score {first_index}"
        stop = first_index - 1 + len(scores)
        assert scores == expected_scores(self.job)[first_index - 1 : stop], f"{self.job.key}: wrong scores"
        self.num_scored = max(self.num_scored, stop)

    def finished(self, reason: FinishReason | None) -> None:
        if reason is None:
            assert isinstance(self.job, PrefillJob), f"{self.job.key} handed over, but is no prefill"
            assert len(self.output) == len(self.job.output_tokens) + 1 < len(self.expected) + 1
            assert tuple(self.output) != self.expected, f"{self.job.key}: nothing was left to hand over"
        else:
            assert tuple(self.output) == self.expected and reason is self.reason, f"{self.job.key}: a wrong end"
        is_scored = self.job.request.prompt_logprobs is not None and not isinstance(self.job, ResumeJob)
        assert self.num_scored == (len(self.job.request.prompt_tokens) - 1 if is_scored else 0)
        self._end("finished")

    def failed(self) -> None:
        self._end("failed")

    def cancelled(self) -> None:
        self._end("cancelled")

    def _end(self, how: str) -> None:
        assert self.end is None, f"{self.job.key} {how}, but had {self.end} already"
        self.end = how
