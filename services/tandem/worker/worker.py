"""One life of one worker: its threads, streams and server, begun and ended in order; decides nothing about jobs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio

from tandem.core.clock import Clock
from tandem.core.config import Config
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import KVFact
from tandem.core.ids import WorkerRef
from tandem.core.topology import Topology
from tandem.core.worker_load import DrainResult
from tandem.engine.factory import build_engine, engine_limits
from tandem.engine.ports import StepObserver, TransportPeer
from tandem.engine.step_log import StepLogHead, step_settings
from tandem.stores.redis_health import RedisHealth
from tandem.stores.registry_heartbeat import Heartbeat
from tandem.stores.worker_record import WorkerRecord
from tandem.stores.worker_registry import WorkerRegistry
from tandem.transfer.process_identity import machine_identity
from tandem.transfer.transport import Transport
from tandem.wire.gen.worker_pb2_grpc import add_WorkerServicer_to_server
from tandem.wire.peer_auth import PeerAuth
from tandem.worker.engine.calibrate import calibrate
from tandem.worker.engine.driver import Command, EngineDriver
from tandem.worker.engine.recent_steps import RecentSteps
from tandem.worker.engine.serial_pipeline import SerialPipeline
from tandem.worker.engine.step_log_writer import StepWriter
from tandem.worker.gateways.effect_dispatcher import EffectDispatcher
from tandem.worker.gateways.kv_event_publisher import compose_publisher
from tandem.worker.gateways.service import Peers, WorkerService
from tandem.worker.gateways.watch_sessions import WatchSessions
from tandem.worker.kv.consumer_streams import ConsumerStreams
from tandem.worker.kv.handoff_service import HandoffService
from tandem.worker.kv.producer_session import SessionContext
from tandem.worker.kv.producer_sessions import ProducerSessions
from tandem.worker.kv.transfer_client import TransferClient
from tandem.worker.kv.transfer_health import TransferHealthCheck
from tandem.worker.links.link_monitor import compose_link_monitor
from tandem.worker.model.rank_transfer import open_mover
from tandem.worker.model.worker_descriptor import WorkerDescriptor
from tandem.worker.model.worker_info import WorkerInfo
from tandem.worker.model.worker_model import WorkerModel
from tandem.worker.run_file import RunFile
from tandem.worker.telemetry.gauges import MetricSources, StatsReader
from tandem.worker.telemetry.worker_telemetry import WorkerTelemetry

SWEEP_S = 0.25
HEARTBEAT_S = 1.0
"""The longest time without a message on a Watch stream."""
FLUSH_S = 2.0
"""For streams to carry the last messages of a worker that stops."""
THREAD_S = 10.0
"""For the transfer thread to end."""

_log = logging.getLogger(__name__)


class KVEndpoint(NamedTuple):
    """How KV comes and goes: over this process's `transport`, and how all ranks are read."""

    transport: Transport
    peer: TransportPeer


class Worker:
    """Made by `program.start_worker`, ended by `stop`. All methods on one event loop."""

    def __init__(
        self,
        config: Config,
        model: WorkerModel,
        me: WorkerRef,
        server: grpc.aio.Server,
        trust: PeerAuth,
        link: KVEndpoint,
        clock: Clock,
    ) -> None:
        self.me = me
        self._failure: str | None = None
        self._has_failed, self._has_stopped = asyncio.Event(), False
        self._config, self._clock, self._server = config, clock, server
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._trust, self._rank_group = trust, model.rank_group
        self._identity = _identity(config, model, me, link.peer)
        self._redis_health = RedisHealth()
        self._introduction = WorkerDescriptor(self._identity, trust, self._redis_health)
        self._gateways = WatchSessions(config.worker.gateway_grace_s)
        self._consumers = ConsumerStreams()
        self._reads = TransferClient(self._post, self._peer_lost, self._tested, self._moved_last, digests=self._digests)
        self._mover = open_mover(link.transport, model, self._reads.on_event, clock)
        self._reads.attach(self._mover)
        self._publisher = compose_publisher(config.redis, me, _num_cacheable(model), clock, self._redis_health)
        self._router = EffectDispatcher(
            self._loop,
            self._gateways,
            self._consumers,
            self._reads,
            self._set_moving,
            self._engine_ended,
            self._on_registered,
        )
        self.steps = RecentSteps()
        self._step_writer, self._run_file = _step_writer(config, model, me), _run_file(config, me)
        self._telemetry = WorkerTelemetry(config, self._identity, clock)
        self._driver = self._compose_driver(config, model)
        self._links = ProducerSessions(self._link_context())
        self._link_monitor = compose_link_monitor(
            config, model, self._identity, trust, self._reads, clock, self._gateways.wake
        )
        self._router.attach(self._links, self._telemetry.job_ended)
        self._probe = TransferHealthCheck(self._mover.self_test)
        self._service = self._compose_service(model)
        add_WorkerServicer_to_server(self._service, server)
        self._telemetry.watch(self._sources())

    def __repr__(self) -> str:
        return f"<worker {self.me}: {self.healthy() or 'healthy'}>"

    async def start(self) -> None:
        """Raises TandemError when the transport does not work here."""
        self._mover.start()
        error = await self._probe.once()
        if error is not None:
            raise TandemError(ErrorKind.UNSUPPORTED, error, param="handoff.transport")
        if self._rank_group is not None:
            self._rank_group.watch(self._driver.fail_device)
        self._driver.start()
        # The engine's first snapshot is here with its answer: nobody is told of a worker without blocks.
        await asyncio.wrap_future(self._driver.call(lambda engine, now: (None, [])))
        self._introduction.metrics_address = await asyncio.to_thread(self._telemetry.open)
        await self._server.start()
        self._spawn(self._sweep(), "sweep")
        self._spawn(self._beat(), "beat")
        self._spawn(self._probe.run(), "probe")
        registry = self._open_registry()
        self._spawn(self._link_monitor.run(None if registry is None else lambda: self._list(registry)), "attest")
        if registry is not None:
            self._spawn(self._register(registry), "register")
        if self._publisher is not None:
            self._spawn(self._publisher.run(), "publish")
        if self._run_file is not None:
            self._run_file.write()
        where = self._introduction.metrics_address or "nowhere"
        _log.info("%s serves %s; its /metrics: %s", self.me, self._identity.model, where)

    def healthy(self) -> str | None:
        """None, or why this worker should be replaced."""
        return self._failure or self._driver.stalled() or self._probe.error

    @property
    def num_gateways(self) -> int:
        """Gateways that have a stream, or had one not long ago."""
        return len(self._gateways)

    async def failed(self) -> str:
        """Wait until the engine or the transfer thread is of no use any more; returns why."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    async def drain(self, timeout_s: float) -> DrainResult:
        """Take no new work, and let what runs go on elsewhere, until nothing is left or the time is over."""
        return await self._service.drain(timeout_s)

    async def stop(self) -> None:
        """End at once: live jobs fail, streams carry that and end, threads and tasks are gone. Never raises."""
        if self._has_stopped:
            return
        self._has_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not await asyncio.to_thread(self._driver.stop, self._config.worker.step_stall_s):
            _log.error("a step does not end; its thread is left behind")
        writer = self._step_writer
        if writer is not None and not await asyncio.to_thread(writer.close, THREAD_S):
            _log.error("the last steps cannot be written; their thread is left behind")
        self._gateways.close()
        self._consumers.close()
        await self._links.close()
        self._link_monitor.cancel()
        await self._server.stop(FLUSH_S)
        if await asyncio.to_thread(self._mover.stop, THREAD_S):
            await self._link_monitor.close()
        else:
            _log.error("the transfer thread does not end; it is left behind")
        if self._rank_group is not None:
            await asyncio.to_thread(self._rank_group.close)
        await asyncio.to_thread(self._telemetry.close, FLUSH_S)
        if self._run_file is not None:
            self._run_file.remove()
        _log.info("%s has stopped", self.me)

    # ---- composition

    @property
    def _digests(self) -> bool:
        return self._config.handoff.digests

    def _compose_driver(self, config: Config, model: WorkerModel) -> EngineDriver:
        limits = engine_limits(config, model.max_model_len)
        return EngineDriver(
            build_engine(
                config,
                model.executor,
                model.fingerprint,
                model.max_model_len,
                records_facts=self._publisher is not None,
            ),
            model.pipeline or SerialPipeline(model.executor),
            self._router,
            self._clock,
            config.worker.step_stall_s,
            self._observers(),
            lambda: calibrate(model.executor, self._clock, limits),
        )

    def _observers(self) -> tuple[StepObserver, ...]:
        ours = (self.steps, self._telemetry.steps)
        return ours if self._step_writer is None else (*ours, self._step_writer)

    def _sources(self) -> MetricSources:
        reader = StatsReader(lambda: self._driver.call(lambda engine, now: (engine.books(), [])), self._clock)
        return MetricSources(
            snapshot=lambda: self._router.snapshot,
            books=reader.read,
            is_healthy=lambda: self.healthy() is None,
            num_gateways=lambda: self.num_gateways,
        )

    def _link_context(self) -> SessionContext:
        return SessionContext(
            me=self.me,
            fingerprint=self._identity.fingerprint,
            transport_kind=self._identity.transport_kind,
            trust=self._trust,
            clock=self._clock,
            post=self._driver.post,
            connect=self._reads.connect,
            let_go=self._reads.disconnect_when_idle,
            lease_s=self._config.handoff.lease_s,
        )

    def _compose_service(self, model: WorkerModel) -> WorkerService:
        fingerprint, lease_s = self._identity.fingerprint, self._config.handoff.lease_s
        follows = HandoffService(self._driver, self._consumers, fingerprint, lease_s)
        return WorkerService(
            self._introduction,
            self._driver,
            self._router,
            self._gateways,
            Peers(follows, self._link_monitor),
            self._clock,
            model.prepare,
        )

    def _open_registry(self) -> WorkerRegistry | None:
        redis = self._config.redis
        return WorkerRegistry(redis.url, redis.namespace, health=self._redis_health) if redis.url else None

    # ---- from other threads

    def _post(self, command: Command) -> None:
        self._driver.post(command)

    def _set_moving(self, is_transferring: bool) -> None:
        # A mover that has stopped is known of by then.
        with contextlib.suppress(RuntimeError):
            self._mover.set_busy(is_transferring)

    def _peer_lost(self, source: WorkerRef) -> None:
        def lose() -> None:
            self._links.peer_lost(source)
            self._link_monitor.doubt(source)

        self._cross(lose)

    def _tested(self, error: str | None) -> None:
        self._cross(lambda: self._probe.answer(error))

    def _moved_last(self, error: str | None) -> None:
        if error is not None:
            self._cross(lambda: self._fail(f"the transfer thread failed: {error}"))

    def _cross(self, call: Callable[[], None]) -> None:
        # A closed loop has nobody left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    # ---- on the event loop

    def _engine_ended(self, error: str | None) -> None:
        if error is not None:
            self._fail(f"the engine failed: {error}")

    def _on_registered(self, facts: Sequence[KVFact]) -> None:
        if self._publisher is not None:
            self._publisher.told(facts)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            _log.error("%s: %s", self.me, reason)
            self._failure = reason
            self._has_failed.set()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=f"{name} of {self.me.id}")
        task.add_done_callback(self._task_ended)
        self._tasks.append(task)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(f"task {task.get_name()} failed: {task.exception()!r}")

    async def _sweep(self) -> None:
        """Cancel the jobs of gateways that are gone."""
        while True:
            await asyncio.sleep(SWEEP_S)
            lost = self._gateways.sweep(self._clock.now())
            if lost:
                _log.warning("%d jobs are cancelled: nobody has watched them", len(lost))
            self._service.cancel(lost)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._gateways.wake()

    async def _list(self, registry: WorkerRegistry) -> Sequence[WorkerRecord]:
        """Who is registered. Of others nothing is kept open but what this worker takes KV from now."""
        records = await registry.list()
        self._reads.keep(self._links.sources | {record.worker for record in records})
        return records

    async def _register(self, registry: WorkerRegistry) -> None:
        record = WorkerRecord(
            worker=self.me,
            pool=self._identity.pool,
            model=self._identity.model,
            fingerprint=self._identity.fingerprint,
            layout=str(self._identity.transport.layout),
            max_model_len=self._identity.max_model_len,
            bundle_digest=self._identity.bundle_digest,
            topology=self._identity.topology,
        )
        try:
            await Heartbeat(registry, record, self._introduction.take_role).run()
        finally:
            await registry.close()


def _step_writer(config: Config, model: WorkerModel, me: WorkerRef) -> StepWriter | None:
    if not config.worker.step_log:
        return None
    head = StepLogHead(
        worker=f"{me.id}-{me.incarnation}",
        pool=config.worker.pool,
        model=model.name,
        num_threads=config.engine.num_threads,
        num_blocks=model.executor.num_blocks,
        layout=model.executor.layout,
        settings=step_settings(with_device_defaults(config)),
    )
    return StepWriter(Path(config.worker.step_log), head)


def _run_file(config: Config, me: WorkerRef) -> RunFile | None:
    return RunFile(Path(config.worker.run_dir), me) if config.worker.run_dir else None


def _identity(config: Config, model: WorkerModel, me: WorkerRef, peer: TransportPeer) -> WorkerInfo:
    return WorkerInfo(
        me=me,
        pool=config.worker.pool,
        model=model.name,
        fingerprint=model.fingerprint,
        max_model_len=model.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        bundle=model.bundle,
        bundle_digest=model.bundle.digest,
        transport=peer,
        transport_kind=config.handoff.transport,
        aliases=model.aliases,
        topology=Topology(config.worker.host_label, config.worker.rack, config.worker.zone),
        machine=machine_identity(),
    )


def _num_cacheable(model: WorkerModel) -> int:
    """Blocks that it can hold, in both memories."""
    return model.executor.num_blocks + model.executor.num_host_slots
