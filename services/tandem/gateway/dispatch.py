"""Runs the lives of all requests of this gateway at its workers; never decides anything about one.

What happens to a request is `flow.lifecycle`, where it goes is `routing.router`; here their commands are carried out
and what comes back is fed to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Sequence

from tandem.core.clock import Clock
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import JobEvent
from tandem.core.ids import HandoffId, JobKey, RequestId, WorkerRef
from tandem.core.request import Job, Request, SamplingParams
from tandem.flow.commands import CancelJob, Command, Deliver, End, EndChoice, Place, ReleaseLease, Score, Submit
from tandem.flow.lifecycle import Phase, RequestLife
from tandem.gateway.active import ActiveRequest
from tandem.gateway.caller import Caller
from tandem.gateway.fleet import Fleet
from tandem.gateway.ports import ServedModel
from tandem.routing.placement import NoPlacement, Placement
from tandem.routing.router import place

TICK_S = 0.05
REFUSAL_BACKOFF_S = 0.1
PROBE_TIMEOUT_S = 30.0


class Dispatcher:
    """The one Dispatch of a gateway. All of it runs on one event loop."""

    def __init__(self, fleet: Fleet, config: GatewayConfig, clock: Clock) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._active: dict[RequestId, ActiveRequest] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        self._ticker = asyncio.create_task(self._tick_forever(), name="dispatch-tick")

    async def drain(self, timeout_s: float) -> int:
        """Take no new request and wait for those that run; returns how many were cut off."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        left = list(self._active.values())
        for active in left:
            error = TandemError(ErrorKind.DRAINING, "this gateway is shutting down", retry_after_s=1.0)
            self._carry_out(active, active.life.failed(error))
        return len(left)

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- the Dispatch port

    def models(self) -> Sequence[ServedModel]:
        return self._fleet.models()

    def ready(self) -> str | None:
        return "draining" if self._draining else self._fleet.ready()

    def num_queued(self) -> int:
        return sum(1 for active in self._active.values() if active.life.phase is Phase.QUEUED)

    async def open(self, request: Request, caller: Caller) -> ActiveRequest:
        """Admit a request; it waits in line when no worker has room."""
        if self._draining:
            raise TandemError(ErrorKind.DRAINING, "this gateway is shutting down", retry_after_s=1.0)
        if self.num_queued() >= self._config.max_queued:
            raise TandemError(
                ErrorKind.OVERLOADED, f"{self._config.max_queued} requests are waiting already", retry_after_s=1.0
            )
        active = self._admit(request)
        self.place_queued()
        return active

    # ---- what the fleet reports

    def reported(self, worker: WorkerRef, events: Sequence[JobEvent]) -> None:
        now = self._clock.now()
        for event in events:
            active = self._active.get(event.key.request)
            if active is not None:
                active.moved_at = now
                self._carry_out(active, active.life.reported(worker, event))

    def lost(self, worker: WorkerRef, reason: str) -> None:
        for active in list(self._active.values()):
            self._carry_out(active, active.life.worker_lost(worker, reason))

    def positions(self, worker: WorkerRef) -> list[tuple[JobKey, int]]:
        """What this gateway waits for from a worker: jobs and the index of each one's next token."""
        return [position for active in self._active.values() for position in active.life.positions(worker)]

    async def probe(self, placement: Placement, model: str) -> bool:
        """Send one tiny request through a pair of workers; True when its KV block has moved."""
        request = probe_request(model)
        active = self._admit(request)
        active.pinned = placement
        self._place(active)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async for _ in active:
                    pass
        except (TandemError, TimeoutError):
            return False
        finally:
            await active.aclose()
        return active.life.pulled is not None

    def place_queued(self) -> None:
        """Place what waits, in the order of arrival."""
        for active in [a for a in self._active.values() if a.life.phase is Phase.QUEUED]:
            self._place(active)

    # ---- inside

    def _admit(self, request: Request) -> ActiveRequest:
        life = RequestLife(request, HandoffId(secrets.token_hex(12)))
        self._idle.clear()
        active = self._active[request.id] = ActiveRequest(life, self._clock.now(), self._closed, self._finished)
        return active

    def _closed(self, active: ActiveRequest) -> None:
        self._carry_out(active, active.life.cancelled())

    def _finished(self, active: ActiveRequest, choice: int) -> None:
        self._carry_out(active, active.life.finished(choice))

    def _place(self, active: ActiveRequest) -> None:
        now = self._clock.now()
        outcome: Placement | NoPlacement
        excluded = active.excluded(now)
        if active.pinned is None:
            model, policy = active.life.request.model, self._config.disaggregation
            outcome = place(self._fleet.candidates(), model, policy, excluded)
        elif excluded & {active.pinned.prefill, active.pinned.decode}:
            outcome = NoPlacement("a worker of the pair refused a moment ago", may_pass=True)
        else:
            outcome = active.pinned
        if isinstance(outcome, Placement):
            self._carry_out(active, active.life.placed(outcome))
        else:
            active.waiting_for = outcome.reason

    def _carry_out(self, active: ActiveRequest, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Place():
                    active.exclude(command.excluded, self._clock.now() + REFUSAL_BACKOFF_S)
                case Submit():
                    self._spawn(self._submit(active, command.worker, command.job))
                case CancelJob():
                    self._fleet.cancel(command.worker, command.keys)
                case ReleaseLease():
                    self._fleet.release(command.worker, command.key)
                case Deliver(event) | Score(event) | EndChoice(event):
                    active.push(event)
                case End():
                    self._active.pop(active.life.request.id, None)
                    if not self._active:
                        self._idle.set()
                    active.push(command.outcome)

    async def _submit(self, active: ActiveRequest, worker: WorkerRef, job: Job) -> None:
        try:
            await self._fleet.submit(worker, job)
        except TandemError as error:
            commands = active.life.refused(worker, job.key, error)
        else:
            commands = active.life.accepted(worker, job.key)
            active.moved_at = self._clock.now()
        self._carry_out(active, commands)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.place_queued()
            now = self._clock.now()
            for active in list(self._active.values()):
                error = self._overdue(active, now)
                if error is not None:
                    self._carry_out(active, active.life.failed(error))

    def _overdue(self, active: ActiveRequest, now: float) -> TandemError | None:
        """A request that is sent back to the queue does not begin its wait anew."""
        if active.life.phase is Phase.QUEUED:
            if now - active.came_at < self._config.queue_timeout_s:
                return None
            reason = f"no place within {self._config.queue_timeout_s:g} s: {active.waiting_for}"
            return TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        if now - active.moved_at < self._config.progress_timeout_s:
            return None
        return TandemError(ErrorKind.DEADLINE, f"no progress within {self._config.progress_timeout_s:g} s")


def probe_request(model: str) -> Request:
    """The smallest request that moves one block: one token in, two out, greedy."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return Request(id=RequestId(f"probe-{secrets.token_hex(8)}"), model=model, prompt_tokens=(0,), sampling=sampling)
