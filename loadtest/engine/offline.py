"""Run a workload on our engine inside this process, composed as in a worker, and split the time of every step.

    python -m loadtest offline WORKLOAD... [--seed N] [--json FILE]

A worker's two threads are one here: after each step the events go through the same outboxes and the same encoding as a
worker's Watch stream, and that time is the step's `stream_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from loadtest.client.records import Record, Run, Step
from loadtest.client.workloads import BenchRequest, Workload
from tandem.core.clock import Clock
from tandem.core.config import Config
from tandem.core.events import Failed, Finished, JobEvent, Token
from tandem.core.ids import GatewayId, RequestId
from tandem.core.request import GenerateJob, Request, SamplingParams
from tandem.core.worker_load import WorkerLoad
from tandem.engine.effects import Effect
from tandem.engine.engine import Engine
from tandem.engine.factory import build_engine
from tandem.engine.ports import Executor
from tandem.runtime.executor import TorchExecutor
from tandem.sched.state.step_plan import StepPlan
from tandem.wire.worker_codec import encode_update
from tandem.worker.gateways.outbox import WatchSessions
from tandem.worker.model.worker_model import WorkerModel

if TYPE_CHECKING:
    from tandem.runtime.architectures.spec import DecoderSpec
    from tandem.runtime.input_batch import Batch
    from tandem.runtime.kv_cache import KVCache
    from tandem.runtime.models.causal import CausalModel

_GATEWAY = GatewayId("loadtest")
_IDLE_S = 0.0005
"""Maximum sleep of an idle engine, in seconds, before it checks the schedule again."""


class TimedModel:
    """Wrap a `CausalModel` and add up the time that is spent inside it."""

    def __init__(self, model: CausalModel, clock: Clock) -> None:
        self._model = model
        self._clock = clock
        self._inside_s = 0.0

    @property
    def config(self) -> DecoderSpec:
        return self._model.config

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        began = self._clock.now()
        hidden = self._model.forward(batch, cache)
        self._inside_s += self._clock.now() - began
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        began = self._clock.now()
        logits = self._model.logits(hidden)
        self._inside_s += self._clock.now() - began
        return logits

    def expert_tokens(self) -> Mapping[int, Sequence[int]]:
        return self._model.expert_tokens()

    def take_s(self) -> float:
        """Return the seconds inside the model since the last call."""
        inside, self._inside_s = self._inside_s, 0.0
        return inside


class OfflineEngine:
    """A loaded engine in this process, without servers; `run` may be called repeatedly.

    `sleep` waits for due requests when nothing is running.
    """

    def __init__(
        self, config: Config, model: WorkerModel, clock: Clock, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.executor: Executor = model.executor
        self.timed: TimedModel | None = None
        if isinstance(model.executor, TorchExecutor):
            self.timed = TimedModel(model.executor.model, clock)
            model.executor.model = self.timed
        self.engine: Engine = build_engine(config, model.executor, model.fingerprint, model.max_model_len)
        self.name = model.name
        self.clock = clock
        self.sleep = sleep

    def run(self, workload: Workload, system: str = "tandem-offline") -> Run:
        """Submit the requests of a workload when they are due, between steps, until all have ended; return the run."""
        return _Pass(self, workload).run(system)


class _Pass:
    """Run one workload on one engine."""

    def __init__(self, offline: OfflineEngine, workload: Workload) -> None:
        self._offline, self._engine, self._clock = offline, offline.engine, offline.clock
        self._workload = workload
        self._last_load: WorkerLoad | None = None
        self._load_key: tuple[object, ...] | None = None
        self._waiting = sorted(workload.requests, key=lambda request: 0.0 if workload.is_sequential else request.due_s)
        self._began = self._clock.now()
        self._open: dict[str, _Answer] = {}
        self._records: dict[str, Record] = {}
        self._steps: list[Step] = []
        self._gateways = WatchSessions(grace_s=0.0)
        self._watch, _ = self._gateways.attach(_GATEWAY, {}, 0.0)

    def run(self, system: str) -> Run:
        while self._waiting or self._open:
            self._submit_due()
            began = self._clock.now()
            self._engine.tick(began)
            plan, effects = self._engine.begin(began)
            planned = self._clock.now()
            if plan is None:
                self._rest()
                continue
            self._step(plan, effects, began, planned)
        return Run(
            system=system,
            workload=self._workload.name,
            seed=self._workload.seed,
            turn=self._workload.turn,
            records=tuple(self._records[request.name] for request in self._workload.requests),
            wall_s=self._now(),
            steps=tuple(self._steps),
        )

    def _now(self) -> float:
        return self._clock.now() - self._began

    def _submit_due(self) -> None:
        """Submit due requests; in a sequence the next request is due when the one before has ended."""
        while self._waiting:
            request = self._waiting[0]
            if self._workload.is_sequential and self._open:
                return
            now = self._now()
            due = now if self._workload.is_sequential else request.due_s
            if due > now:
                return
            self._waiting.pop(0)
            self._submit(request, due, now)

    def _submit(self, request: BenchRequest, due: float, now: float) -> None:
        sampling = SamplingParams(max_tokens=request.max_tokens, temperature=0.0)
        name = RequestId(
            f"{self._workload.name}-{self._workload.seed}-{self._workload.turn}-{self._began}-{request.name}"
        )
        job = GenerateJob(
            request=Request(id=name, model=self._offline.name, prompt_tokens=request.prompt, sampling=sampling),
            attempt=1,
        )
        self._gateways.register(_GATEWAY, job.keys, 0, 0.0)
        self._open[name] = _Answer(request, due, now)
        self._engine.submit(job, self._clock.now())

    def _step(self, plan: StepPlan, effects: list[Effect], began: float, planned: float) -> None:
        result = self._offline.executor.execute(plan)
        executed = self._clock.now()
        effects = [*effects, *self._engine.finish(result, executed)]
        committed = self._clock.now()
        self._engine.pacer.measured(result, committed - began)
        events = [effect for effect in effects if isinstance(effect, JobEvent)]
        self._stream(plan, events)
        streamed = self._clock.now()
        inside = self._offline.timed.take_s() if self._offline.timed is not None else 0.0
        # A slice of one position that samples a token is a decode, or the tail of a prompt: too rare to matter.
        num_decodes = sum(piece.num_tokens == 1 for piece in plan.slices)
        self._steps.append(
            Step(
                num_decodes=num_decodes,
                num_prefill_tokens=plan.num_tokens - num_decodes,
                plan_s=planned - began,
                model_s=inside,
                batch_s=executed - planned - inside,
                commit_s=committed - executed,
                stream_s=streamed - committed,
            )
        )
        # Our own bookkeeping is no part of the step: a worker has none.
        for event in events:
            self._take_in(event, streamed - self._began)

    def _stream(self, plan: StepPlan, events: Sequence[JobEvent]) -> None:
        """Encode the events of a plan as a worker does for its gateway."""
        self._gateways.deliver(events)
        load, key = self._last_load, self._engine.load_key(plan)
        if key is None or key != self._load_key:
            load = self._engine.load()
        self._load_key = key
        encode_update(self._watch.box.take(0.0), load if load != self._last_load else None).SerializeToString()
        self._last_load = load

    def _take_in(self, event: JobEvent, now: float) -> None:
        name = event.key.request
        answer = self._open[name]
        if isinstance(event, Token):
            answer.stamps_s.append(now)
            answer.tokens.append(event.token.id)
        elif isinstance(event, Finished | Failed):
            self._records[answer.request.name] = self._open.pop(name).record(event)
            self._gateways.discard([event.key])

    def _rest(self) -> None:
        due = self._waiting[0].due_s if self._waiting else 0.0
        self._offline.sleep(min(max(due - self._now(), 0.0), _IDLE_S))


class _Answer:
    def __init__(self, request: BenchRequest, due_s: float, sent_s: float) -> None:
        self.request, self.due_s, self.sent_s = request, due_s, sent_s
        self.stamps_s: list[float] = []
        self.tokens: list[int] = []

    def record(self, end: Finished | Failed) -> Record:
        num_requested = self.request.max_tokens
        error = end.message if isinstance(end, Failed) else ""
        if not error and len(self.tokens) != num_requested:
            error = f"{len(self.tokens)} of {num_requested} tokens"
        return Record(
            name=self.request.name,
            group=self.request.group,
            num_prompt_tokens=len(self.request.prompt),
            num_requested_tokens=num_requested,
            due_s=self.due_s,
            sent_s=self.sent_s,
            stamps_s=tuple(self.stamps_s),
            tokens=tuple(self.tokens),
            num_output_tokens=len(self.tokens),
            finish_reason="length",
            error=error,
        )
