"""Let a request director decode requests at one worker, for tests of moves between workers."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.core.config import GatewayConfig
from tandem.core.events import SampledToken, Token
from tandem.core.ids import HandoffId, Incarnation, JobKey, RequestId, WorkerId, WorkerRef
from tandem.core.lane import Lane
from tandem.core.request import Request, SamplingParams
from tandem.orchestration.commands import Command, MoveOutcome, ReportMove, SubmitJob
from tandem.orchestration.director import RequestDirector
from tandem.routing.worker_view import WorkerView
from tests.unit.orchestration.known_workers import BookedWorkers

A, B, C = (WorkerRef(WorkerId(name), Incarnation(1), f"{name}:1") for name in "abc")


class DecodingRequests:
    """Requests that worker A decodes, and the time, which passes in `tick` and `wait`. `view`: that of A."""

    def __init__(self, view: WorkerView, config: GatewayConfig) -> None:
        self.workers = BookedWorkers([view])
        self.director = RequestDirector(self.workers, config, lambda request: HandoffId("h"))
        self.now = 0.0

    def start(
        self, number: int, *, num_prompt: int, num_output: int, max_tokens: int, num_choices: int,
        lane: Lane = Lane.INTERACTIVE,
    ) -> JobKey:  # fmt: skip
        """Submit a request, of which A then samples `num_output` tokens for each choice."""
        request = Request(
            id=RequestId(f"r{number}"), model="m", prompt_tokens=(1,) * num_prompt, num_choices=num_choices, lane=lane,
            sampling=SamplingParams(max_tokens=max_tokens),
        )  # fmt: skip
        (submit,) = self.director.submit(request, 0.0).commands
        assert isinstance(submit, SubmitJob)
        self.director.on_submit_result(A, submit.job.key, None, 0.0)
        for choice in range(num_choices):
            self.tokens(A, submit.job.key._replace(choice=choice), 0, num_output)
        return submit.job.key

    def tokens(self, worker: WorkerRef, key: JobKey, first: int, last: int) -> list[Command]:
        events = [Token(key, index, SampledToken(index)) for index in range(first, last)]
        return self.director.on_worker_events(worker, events, self.now)

    def tick(self, seconds: float = 0.1) -> list[Command]:
        self.now += seconds
        commands = self.director.on_timer(self.now) + self.director.rebalance(self.now)
        self.director.check()
        return commands

    def wait(self, seconds: float, tick_s: float = 0.1) -> list[Command]:
        """Let time pass until there is something to do, at most `seconds`; return it."""
        commands: list[Command] = []
        until = self.now + seconds
        while not commands and self.now < until:
            commands = self.tick(tick_s)
        return commands


def outcomes(commands: Sequence[Command]) -> list[MoveOutcome]:
    return [command.outcome for command in commands if isinstance(command, ReportMove)]
