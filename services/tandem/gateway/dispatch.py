"""Runs the lives of all requests of this gateway at its workers; never decides anything about one.

What happens to a request is `flow.lifecycle`, where it goes is `routing.router`; here their commands are carried out
and what comes back is fed to them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Coroutine, Sequence

from tandem.admission.line import Line
from tandem.admission.terms import on_terms
from tandem.core.clock import Clock
from tandem.core.config import GatewayConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, JobEvent, Pulled, Token
from tandem.core.ids import BlockHash, HandoffId, JobKey, RequestId, WorkerRef
from tandem.core.request import Job, Request, SamplingParams
from tandem.flow.commands import CancelJob, Command, Deliver, End, EndChoice, Place, ReleaseLease, Score, Submit
from tandem.flow.lifecycle import Phase, RequestLife
from tandem.flow.waiting import Waiting
from tandem.gateway.active import ActiveRequest
from tandem.gateway.background import surviving
from tandem.gateway.caller import Caller
from tandem.gateway.fleet import Fleet
from tandem.gateway.ports import NO_PREFIXES, KnownPrefixes, Quotas, ServedModel
from tandem.routing.placement import Placement
from tandem.routing.view import WorkerView
from tandem.sched.targets import NO_TARGETS, LatencyTargets

TICK_S = 0.05
PROBE_TIMEOUT_S = 30.0


class Dispatcher:
    """The one Dispatch of a gateway. All of it runs on one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        config: GatewayConfig,
        clock: Clock,
        quotas: Quotas,
        targets: LatencyTargets = NO_TARGETS,
        prefixes: KnownPrefixes = NO_PREFIXES,
    ) -> None:
        self._fleet = fleet
        self._quotas = quotas
        self._config = config
        self._clock = clock
        self._waiting = Waiting(fleet.candidates(), config, targets, prefixes, fleet.routing)
        self._prefixes = prefixes
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

    @property
    def line(self) -> Line:
        """Who waits and what each was charged."""
        return self._waiting.line

    # ---- the Dispatch port

    def models(self) -> Sequence[ServedModel]:
        return self._fleet.models()

    def ready(self) -> str | None:
        return "draining" if self._draining else self._fleet.ready()

    def num_queued(self) -> int:
        return sum(1 for active in self._active.values() if active.life.phase is Phase.QUEUED)

    async def open(self, request: Request, caller: Caller) -> ActiveRequest:
        """Admit a request; it waits in line when no worker has room."""
        request = on_terms(request, caller.tenant)
        self._refuse_when_draining()
        most = request.sampling.max_tokens * request.num_choices
        quota = await self._quotas.enter(caller.tenant, len(request.prompt_tokens), most)
        try:
            hashes = await self._prefixes.name(request)
            self._refuse_when_draining()  # it may be by now
            active = self._enter(request, caller, hashes)
        except BaseException:
            quota.close()
            raise
        quota.watch(active.spent)
        active.quota = quota
        self.place_queued()
        return active

    # ---- what the fleet reports

    def reported(self, worker: WorkerRef, events: Sequence[JobEvent]) -> None:
        now = self._clock.now()
        for event in events:
            active = self._active.get(event.key.request)
            if active is None:
                continue
            active.moved_at = now
            if type(event) is Token and event.num_cached_tokens is not None:
                self._prefixes.reported(active.take_predicted(), event.num_cached_tokens)
            if type(event) is Pulled and active.life.placement is not None:
                self._fleet.measured(active.life.placement, event)
            # A job's first token says more than what was drawn.
            if (
                type(event) is Token
                and event.num_cached_tokens is None
                and active.life.streamed(worker, event.key, event.index)
            ):
                self._deliver(active, event)
            else:
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
        self._place_pinned(active)
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                async for _ in active:
                    pass
        except (TandemError, TimeoutError):
            return False
        finally:
            await active.aclose()
        return active.life.pulled is not None

    def may_go_on(self, worker: WorkerView) -> None:
        """A worker may take more than before."""
        if self._waiting.may_go_on(worker):
            self.place_queued()

    def place_queued(self) -> None:
        """Place what waits, in its turn, until the first finds no place."""
        while (turn := self._waiting.next(self._clock.now())) is not None:
            active = self._active[turn.request]
            self._fleet.expect(turn.placement, turn.request, self._waiting.line.charged(turn.request))
            active.predicted = self._prefixes.predict(active.life.request, turn.placement.prefill, turn.num_hit_blocks)
            self._carry_out(active, active.life.placed(turn.placement))

    # ---- inside

    def _admit(self, request: Request) -> ActiveRequest:
        life = RequestLife(request, HandoffId(secrets.token_hex(12)))
        self._idle.clear()
        active = self._active[request.id] = ActiveRequest(life, self._clock.now(), self._closed, self._finished)
        return active

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise TandemError(ErrorKind.DRAINING, "this gateway is shutting down", retry_after_s=1.0)

    def _enter(self, request: Request, caller: Caller, hashes: Sequence[BlockHash]) -> ActiveRequest:
        """A place in the line. Raises TandemError when there is none, or when it would come too late."""
        tenant = caller.tenant
        admitted = self._waiting.admit(
            request, weight=tenant.weight, timeout_s=caller.timeout_s, policy=tenant.disaggregation, hashes=hashes,
            session=caller.own_session,
        )  # fmt: skip
        if admitted.leaves is not None and admitted.error is not None:
            self._make_room(admitted.leaves, admitted.error)
        active = self._admit(request)
        active.prefill_s = admitted.prefill_s
        if caller.timeout_s is not None:
            active.deadline = active.came_at + caller.timeout_s
        return active

    def _make_room(self, leaves: RequestId, error: TandemError) -> None:
        """More wait than may. Raises the error when it is the newcomer, which nobody knows yet, that leaves."""
        out = self._active.get(leaves)
        if out is None:
            self._waiting.leave(leaves)
            raise error
        self._carry_out(out, out.life.failed(error))

    def _closed(self, active: ActiveRequest) -> None:
        self._carry_out(active, active.life.cancelled())

    def _finished(self, active: ActiveRequest, choice: int) -> None:
        self._carry_out(active, active.life.finished(choice))

    def _place_pinned(self, active: ActiveRequest) -> None:
        """A probe is not routed, and does not wait for its turn."""
        assert active.pinned is not None
        self._carry_out(active, active.life.placed(active.pinned))

    def _carry_out(self, active: ActiveRequest, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Place():
                    self._send_back(active, command.excluded)
                case Submit():
                    self._spawn(self._submit(active, command.worker, command.job))
                case CancelJob():
                    self._fleet.cancel(command.worker, command.keys)
                case ReleaseLease():
                    self._fleet.release(command.worker, command.key)
                case Deliver(token):
                    self._deliver(active, token)
                case Score(event) | EndChoice(event):
                    active.push(event)
                case End():
                    self._end(active, command.outcome)

    def _deliver(self, active: ActiveRequest, token: Token) -> None:
        self._waiting.line.drew(active.life.request.id, 1)
        active.push(token)

    def _send_back(self, active: ActiveRequest, excluded: frozenset[WorkerRef]) -> None:
        """To its place in the line, or to the next tick where it has none."""
        self._unplace(active)
        if active.pinned is None:
            self._waiting.refused(excluded, self._clock.now())
            self._waiting.line.put_back(active.life.request.id)

    def _end(self, active: ActiveRequest, outcome: Finished | TandemError) -> None:
        request = active.life.request.id
        self._active.pop(request, None)
        self._unplace(active)
        self._waiting.leave(request, active.life.num_cached)
        if not self._active:
            self._idle.set()
        active.push(outcome)
        if active.quota is not None:
            active.quota.close()

    def _unplace(self, active: ActiveRequest) -> None:
        """It does not go where it was to."""
        if active.life.placement is not None:
            self._fleet.expect(active.life.placement, active.life.request.id, 0)

    async def _submit(self, active: ActiveRequest, worker: WorkerRef, job: Job) -> None:
        try:
            await self._fleet.submit(worker, job)
        except TandemError as error:
            commands = active.life.refused(worker, job.key, error)
        else:
            commands = active.life.accepted(worker, job.key)
            active.was_begun = active.was_begun or active.life.phase is Phase.RUNNING
            active.moved_at = self._clock.now()
        self._carry_out(active, commands)
        if active.life.phase is Phase.QUEUED:
            self.place_queued()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tick_forever(self) -> None:
        while True:
            async with surviving("the tick of the dispatcher"):
                await asyncio.sleep(TICK_S)
                self._tick()

    def _tick(self) -> None:
        """Raises ExceptionGroup after all were seen to: what is wrong with one request holds up no other."""
        now, failures = self._clock.now(), []
        for active in list(self._active.values()):
            try:
                self._see_to(active, now)
            except Exception as error:
                error.add_note(f"at request {active.life.request.id}")
                failures.append(error)
        self.place_queued()
        if failures:
            raise ExceptionGroup("requests that cannot be seen to", failures)

    def _see_to(self, active: ActiveRequest, now: float) -> None:
        error = self._overdue(active, now)
        if error is not None:
            self._carry_out(active, active.life.failed(error))
        elif active.pinned is not None and active.life.phase is Phase.QUEUED:
            self._place_pinned(active)

    def _overdue(self, active: ActiveRequest, now: float) -> TandemError | None:
        """A request that is sent back to the queue does not begin its wait anew."""
        if active.deadline is not None and (error := self._past_deadline(active, active.deadline - now)) is not None:
            return error
        if active.life.phase is Phase.QUEUED:
            if now - active.came_at < self._config.queue_timeout_s:
                return None
            why = self._waiting.why(active.life.request.model)
            reason = f"no place within {self._config.queue_timeout_s:g} s: {why}"
            return TandemError(ErrorKind.NO_WORKER, reason, retry_after_s=1.0)
        if now - active.moved_at < self._config.progress_timeout_s:
            return None
        return TandemError(ErrorKind.DEADLINE, f"no progress within {self._config.progress_timeout_s:g} s")

    def _past_deadline(self, active: ActiveRequest, left_s: float) -> TandemError | None:
        """What the client's own deadline ends: at once where its prompt alone takes longer than what is left."""
        if left_s <= 0:
            return TandemError(ErrorKind.DEADLINE, "the client's deadline has passed", reason="deadline")
        if active.life.phase is Phase.QUEUED and left_s < active.prefill_s:
            reason = f"the client's deadline leaves {left_s:.3g} s, its prompt alone takes {active.prefill_s:.3g} s"
            return TandemError(ErrorKind.SLO_MISS, reason, retry_after_s=1.0, reason="deadline")
        return None


def probe_request(model: str) -> Request:
    """The smallest request that moves one block: one token in, two out, greedy."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    return Request(id=RequestId(f"probe-{secrets.token_hex(8)}"), model=model, prompt_tokens=(0,), sampling=sampling)
