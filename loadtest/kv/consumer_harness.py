"""Run the consumer's end of a hand-off without a server or a model, from a block announcement to `KVReceived`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from tandem.core.clock import SystemClock
from tandem.core.config import HandoffConfig
from tandem.core.events import KVFact, KVReceived, SampledToken
from tandem.core.ids import HandoffId, HandoffKey, RequestId, WorkerRef
from tandem.core.request import Request, ResumeJob, SamplingParams
from tandem.engine.effects import Effect, StartRead, TearDownPeer
from tandem.engine.engine import Engine
from tandem.engine.transfer_messages import SetPolling, TransportPeer
from tandem.kv.block_pool import BlockPool
from tandem.kv.handoff import Announcement, BlockDigest
from tandem.kv.layout import KVLayout
from tandem.sched.state.limits import SchedulerLimits
from tandem.sched.state.step_plan import SliceResult, StepPlan, StepResult
from tandem.transfer.interface import BlockCopy, Transport
from tandem.transfer.transfer_thread import TransferThread
from tandem.worker.engine.driver import EngineDriver, EngineSnapshot, SerialPipeline
from tandem.worker.kv.transfer_client import TransferClient

if TYPE_CHECKING:
    from tandem.runtime.kv_cache import KVCache

LEASE_S = 3600.0
GUARD_S = 120.0
"""Limit in seconds that only ends a measurement that hangs."""


class _Instant:
    """Executor whose steps take no time."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_host_slots = 0
        self.vocab_size = 2

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.number, tuple(SliceResult(piece.seq, (SampledToken(1),)) for piece in plan.slices))


class ConsumerHarness:
    """Run the consumer's engine, driver and KV transfer without a server.

    The harness is also the engine's `EffectSink`.
    """

    def __init__(self, cache: KVCache, transport: Transport) -> None:
        self._clock = SystemClock()
        self._numbers = count(1)
        self._cache = cache
        self._read: StartRead | None = None
        self._arrived = threading.Event()
        self._arrived_at = 0.0
        self._pulled: KVReceived | None = None
        self._client = TransferClient(
            lambda on_event: TransferThread(transport, cache.digest, on_event, self._clock),
            self._post,
            lambda event: None,
            digests=True,
        )
        self._transfer = self._client.transfer
        self._was_moving = False
        self._source: WorkerRef | None = None
        size = cache.num_blocks
        tokens = size * cache.layout.block_size
        limits = SchedulerLimits(max_num_batched_tokens=512, max_num_seqs=8, max_model_len=tokens)
        engine = Engine(
            BlockPool(size, cache.layout.block_size),
            limits,
            HandoffConfig(),
            "measured",
            block_bytes=cache.layout.block_bytes,
        )
        self._driver = EngineDriver(engine, SerialPipeline(_Instant(cache.layout, size)), self, self._clock, GUARD_S)

    def start(self, peer: TransportPeer) -> None:
        self._transfer.start()
        self._driver.start()
        self._client.connect(peer).result(GUARD_S)
        self._source = peer.worker

    def stop(self) -> None:
        self._driver.stop(GUARD_S)
        self._transfer.stop(GUARD_S)

    @property
    def copies(self) -> tuple[BlockCopy, ...]:
        """Return the block copies of the last pull."""
        assert self._read is not None, "nothing was pulled"
        return tuple(map(BlockCopy, (o.block for o in self._read.offered), self._read.local))

    def pull(self, offered: tuple[BlockDigest, ...]) -> tuple[float, KVReceived]:
        """Pull the blocks `offered`; return the seconds from their announcement to their arrival, and the arrival
        event."""
        assert self._source is not None, "not started"
        number = next(self._numbers)
        prompt = tuple((number + i) % 30_000 for i in range(len(offered) * self._cache.layout.block_size))
        sampling = SamplingParams(max_tokens=2, temperature=0.0)
        request = Request(id=RequestId(f"r{number}"), model="measured", prompt_tokens=prompt, sampling=sampling)
        job = ResumeJob(request=request, attempt=1, handoff=HandoffId(f"h{number}"), source=self._source)
        key = HandoffKey(job.handoff, job.attempt)
        message = Announcement(key, 0, offered, len(prompt), (SampledToken(1),))
        self._driver.call(lambda engine, now: (None, engine.submit(job, now))).result(GUARD_S)
        self._driver.post(_grant(key))
        self._arrived.clear()
        began = self._clock.now()
        self._driver.post(lambda engine, now: engine.announced(message, now))
        if not self._arrived.wait(GUARD_S) or self._pulled is None:
            raise RuntimeError("the KV did not arrive")
        return self._arrived_at - began, self._pulled

    def _post(self, command: Callable[[Engine, float], list[Effect]]) -> None:
        self._driver.post(command)

    # ---- the engine's sink, on its thread

    def dispatch(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        if snapshot.is_transferring != self._was_moving:
            self._was_moving = snapshot.is_transferring
            self._transfer.send(SetPolling(snapshot.is_transferring))
        for effect in effects:
            match effect:
                case StartRead():
                    self._client.start_read(effect)
                    self._read = effect
                case TearDownPeer():
                    self._client.tear_down(effect.source, effect.reason)
                case KVReceived() as pulled:
                    self._pulled, self._arrived_at = pulled, self._clock.now()
                    self._arrived.set()
                case _:
                    """Nobody is there to be told."""

    def on_kv_events(self, facts: Sequence[KVFact]) -> None:
        """Ignore the facts, because the engine records none."""

    def ended(self, error: str | None) -> None:
        if error is not None:
            sys.stderr.write(f"the engine failed: {error}\n")


def _grant(key: HandoffKey) -> Callable[[Engine, float], list[Effect]]:
    def renewed(engine: Engine, now: float) -> list[Effect]:
        engine.renewed((key,), now, LEASE_S)
        return []

    return renewed
