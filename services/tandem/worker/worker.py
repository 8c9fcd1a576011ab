"""Run one incarnation of a worker: start its server, transport, threads and streams in order, and stop them in
order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from tandem.core.addresses import format_host
from tandem.core.clock import Clock, SystemClock, wall_ns
from tandem.core.config import Config, WorkerConfig
from tandem.core.device_defaults import with_device_defaults
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import JobEvent, KVFact
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.core.lane import lane_labels
from tandem.core.topology import Topology
from tandem.core.worker_load import DrainResult
from tandem.engine.effects import (
    Effect,
    FollowHandoff,
    JobEnded,
    ReadFiles,
    ReleaseHandoff,
    RenewLeases,
    SendAnnouncement,
    SendHandoffEnded,
    SendRemainderRequest,
    StartRead,
    TearDownPeer,
    WriteFiles,
)
from tandem.engine.factory import build_engine, engine_limits
from tandem.engine.step_log import StepLogHead, step_settings
from tandem.engine.transfer_messages import PeerLost, SetPolling, TransferStopped, TransportPeer
from tandem.stores.redis_client import RedisHealth
from tandem.stores.worker_registry import WorkerRecord, WorkerRegistry, keep_registered
from tandem.transfer.interface import Transport
from tandem.transfer.memory_pool import agent_name
from tandem.transfer.peer_layout import join_ranks
from tandem.transfer.prefault import BackgroundPrefault
from tandem.transfer.process_identity import machine_identity
from tandem.wire.gen.worker_pb2_grpc import add_WorkerServicer_to_server
from tandem.wire.peer_auth import PeerAuth
from tandem.worker.addresses import advertised_address, default_route_address, require_worker_auth
from tandem.worker.engine.calibrate import calibrate
from tandem.worker.engine.driver import EngineDriver, EngineSnapshot, SerialPipeline
from tandem.worker.engine.step_log_writer import StepWriter
from tandem.worker.gateways.grammar_preparation import GrammarPreparation
from tandem.worker.gateways.kv_event_publisher import compose_publisher
from tandem.worker.gateways.outbox import WatchSessions
from tandem.worker.gateways.service import WorkerService
from tandem.worker.kv.block_files import FORMAT, BlockFiles
from tandem.worker.kv.file_cache import FileCache
from tandem.worker.kv.handoff_service import HandoffService
from tandem.worker.kv.producer_session import ProducerSessions, SessionContext
from tandem.worker.kv.transfer_client import TransferClient
from tandem.worker.links.link_monitor import LinkMonitor
from tandem.worker.links.link_probe import LinkProbe
from tandem.worker.model.rank_transfer import OpenTransport, open_transfer, open_transport
from tandem.worker.model.worker_info import WorkerDescriptor, WorkerInfo
from tandem.worker.model.worker_model import WorkerModel
from tandem.worker.run_file import RunFile
from tandem.worker.telemetry.gauges import ExpertLoad, MetricSources, StatsReader
from tandem.worker.telemetry.worker_telemetry import WorkerTelemetry

SWEEP_S = 0.25
"""Seconds between two checks for gateways that are gone."""
HEARTBEAT_S = 1.0
"""Longest time without a message on a Watch stream, in seconds."""
SELF_TEST_PERIOD_S = 10.0
"""Seconds between two self-tests of the transfer thread."""
FLUSH_S = 2.0
"""Time limit in seconds, when a worker stops, for each of: its block files, the last messages of its streams,
telemetry."""
THREAD_S = 10.0
"""Time limit in seconds, when a worker stops, for the transfer thread and for the thread that writes the step log."""

_log = logging.getLogger(__name__)


async def start_worker(
    config: Config,
    model: WorkerModel,
    *,
    open_transport: OpenTransport = open_transport,
) -> Worker:
    """Start a worker for the loaded `model` on the running event loop, and return it once it serves. `open_transport`:
    function that opens the KV transport, which tests replace.

    Raises TandemError when the worker cannot start, for example because its port is in use, after stopping everything
    that it has started.
    """
    incarnation, name = Incarnation(wall_ns()), config.worker.id or f"{socket.gethostname()}-{os.getpid()}"
    trust = require_worker_auth(config, name)
    server = trust.server(incarnation)
    me = WorkerRef(WorkerId(name), incarnation, _bind(server, trust, config.worker))
    agent = agent_name(me.id, me.incarnation)
    _log.info("opening the transport %s", config.transfer.backend)
    transport = await asyncio.to_thread(open_transport, config, model.pool, agent)
    try:
        peer = await asyncio.to_thread(_describe, model, me, transport)
        identity = _identity(config, model, me, peer)
        worker = Worker(config, model, identity, server, trust, transport, SystemClock())
    except BaseException:
        await asyncio.to_thread(transport.close)
        raise
    try:
        await worker.start()
    except BaseException:
        await worker.stop()
        raise
    return worker


class Worker:
    """Compose the parts of one worker and run it from `start` to `stop`.

    Made by `start_worker`. Methods run on the event loop on which the worker was made unless their docstring
    names another thread. Other threads reach the event loop only through `_post`, which keeps the order of arrival. The
    worker is the `EffectSink` of its engine's driver.
    """

    def __init__(
        self,
        config: Config,
        model: WorkerModel,
        identity: WorkerInfo,
        server: grpc.aio.Server,
        trust: PeerAuth,
        transport: Transport,
        clock: Clock,
    ) -> None:
        self.me = identity.me
        self._failure: str | None = None
        self._has_failed = asyncio.Event()
        self._has_stopped = False
        self._config = config
        self._clock = clock
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._tasks: list[asyncio.Task[None]] = []
        self._rank_group = model.rank_group
        self._was_transferring = False
        self._identity = identity
        self._redis_health = RedisHealth()
        self._descriptor = WorkerDescriptor(identity, trust, self._redis_health)
        self._gateways = WatchSessions(config.worker.gateway_grace_s)
        num_cacheable = model.executor.num_blocks + model.executor.num_host_slots
        self._publisher = compose_publisher(config.redis, self.me, num_cacheable, clock, self._redis_health)
        self._step_writer = _step_writer(config, model, self.me)
        self._run_file = RunFile(Path(config.worker.run_dir), self.me) if config.worker.run_dir else None
        self._telemetry = WorkerTelemetry(config, identity, clock)
        self._driver = self._compose_driver(config, model)
        self._transfer_client = TransferClient(
            lambda on_event: open_transfer(transport, model, on_event, clock),
            self._driver.post,
            lambda event: self._post(lambda: self._on_transfer_event(event)),
            digests=config.handoff.digests,
        )
        lease_s = config.handoff.lease_s
        self._file_cache = _file_cache(config, model, self._driver, clock)
        self._prefault = BackgroundPrefault(model.pool)
        self._producers = ProducerSessions(
            SessionContext(identity, trust, clock, self._driver.post, self._transfer_client, lease_s)
        )
        self._handoffs = HandoffService(self._driver, identity.fingerprint, lease_s)
        self._link_monitor = LinkMonitor(
            identity,
            config.transfer,
            LinkProbe(identity, model, config.handoff, trust, clock, self._transfer_client),
            self._transfer_client,
            clock,
            self._gateways.wake,
        )
        self._grammars = GrammarPreparation(model.grammars)
        self._service = WorkerService(
            self._descriptor,
            self._driver,
            self._gateways,
            self._handoffs,
            self._link_monitor,
            clock,
            self._grammars.prepare,
        )
        add_WorkerServicer_to_server(self._service, server)
        stats = StatsReader(lambda: self._driver.call(lambda engine, now: (engine.books(), [])), clock)
        experts = ExpertLoad(model.expert_tokens, clock)
        self._telemetry.watch(
            MetricSources(
                snapshot=lambda: self._service.snapshot,
                books=stats.read,
                is_healthy=lambda: self.healthy() is None,
                num_gateways=lambda: len(self._gateways),
                expert_tokens=experts.tokens,
                expert_imbalance=experts.imbalance,
            )
        )

    def __repr__(self) -> str:
        return f"<worker {self.me}: {self.healthy() or 'healthy'}>"

    async def start(self) -> None:
        """Start threads, server and background tasks, and return once the worker serves. Raises TandemError when the
        transport does not work on this machine or /metrics cannot be served."""
        self._transfer_client.transfer.start()
        error = await self._transfer_client.test()
        if error is not None:
            raise TandemError(ErrorKind.UNSUPPORTED, error, param="transfer.backend")
        if self._rank_group is not None:
            self._rank_group.watch(self._driver.fail_device)
        self._driver.start()
        if self._file_cache is not None:
            self._file_cache.start()
        # Wait for the engine's first snapshot, so that no load report of a worker without blocks goes out.
        await asyncio.wrap_future(self._driver.call(lambda engine, now: (None, [])))
        self._descriptor.metrics_address = await asyncio.to_thread(self._telemetry.open)
        await self._server.start()
        self._spawn(self._sweep(), "sweep")
        self._spawn(self._heartbeat(), "beat")
        self._spawn(self._test_transfer(), "probe")
        redis, registry = self._config.redis, None
        if redis.url:
            registry = WorkerRegistry(redis.url, redis.namespace, health=self._redis_health)
        self._spawn(
            self._link_monitor.run(None if registry is None else lambda: self._list_workers(registry)), "probe links"
        )
        if registry is not None:
            self._spawn(self._register(registry), "register")
        if self._publisher is not None:
            self._spawn(self._publisher.run(), "publish")
        if self._run_file is not None:
            self._run_file.write()
        self._prefault.start()
        metrics_address = self._descriptor.metrics_address or "none"
        _log.info("worker %s serves %s, and /metrics at %s", self.me, self._identity.model, metrics_address)

    def healthy(self) -> str | None:
        """Return the reason why this worker should be replaced: a failure, a step that makes no progress, or a
        transport whose self-test failed. Returns None while it is healthy."""
        return self._failure or self._driver.stalled() or self._transfer_client.problem

    async def failed(self) -> str:
        """Wait until the engine, the transfer thread or a background task has failed, and return the reason. Never
        returns in a worker that does not fail."""
        await self._has_failed.wait()
        assert self._failure is not None
        return self._failure

    async def drain(self, timeout_s: float) -> DrainResult:
        """Refuse new jobs, let running ones migrate or finish, and wait up to `timeout_s` seconds until no job and no
        lease (offer of KV to another worker) is left. Returns how many jobs and leases are left, and how many sequences
        migrated or went back to gateways; all numbers are 0 where the engine has ended. Does not raise."""
        return await self._service.drain(timeout_s, is_final=True)

    async def stop(self) -> None:
        """Stop the worker without waiting for its jobs. Live jobs fail; the streams to gateways deliver these failures
        and end; then threads and tasks end.

        Does not raise; a second call does nothing.
        """
        if self._has_stopped:
            return
        self._has_stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not await asyncio.to_thread(self._driver.stop, self._config.worker.step_stall_s):
            message = "worker %s stops without its engine, whose step has not ended within %g s (worker.step_stall_s)"
            _log.error(message, self.me, self._config.worker.step_stall_s)
        if self._file_cache is not None and not await asyncio.to_thread(self._file_cache.stop, FLUSH_S):
            _log.error("worker %s stops while a block file is being read or written", self.me)
        writer = self._step_writer
        if writer is not None and not await asyncio.to_thread(writer.close, THREAD_S):
            _log.error("the last lines of the step log are lost: they were not written within %g s", THREAD_S)
        await asyncio.to_thread(self._prefault.stop, THREAD_S)
        self._gateways.close()
        self._handoffs.close()
        self._grammars.close()
        await self._producers.close()
        self._link_monitor.cancel()
        await self._server.stop(FLUSH_S)
        if await asyncio.to_thread(self._transfer_client.transfer.stop, THREAD_S):
            await self._link_monitor.close()
        else:
            _log.error(
                "worker %s stops without its transfer thread, which has not ended within %g s", self.me, THREAD_S
            )
        if self._rank_group is not None:
            await asyncio.to_thread(self._rank_group.close)
        await asyncio.to_thread(self._telemetry.close, FLUSH_S)
        if self._run_file is not None:
            self._run_file.remove()
        _log.info("worker %s has stopped", self.me)

    def _compose_driver(self, config: Config, model: WorkerModel) -> EngineDriver:
        limits = engine_limits(config, model.max_model_len)
        engine = build_engine(
            config, model.executor, model.fingerprint, model.max_model_len, records_facts=self._publisher is not None
        )
        return EngineDriver(
            engine,
            model.pipeline or SerialPipeline(model.executor),
            self,
            self._clock,
            config.worker.step_stall_s,
            [self._telemetry.steps, *([self._step_writer] if self._step_writer is not None else [])],
            lambda: calibrate(model.executor, self._clock, limits),
        )

    # ---- on the engine's thread

    def dispatch(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        """Carry out effects of the engine. Starts reads from other workers, tears down connections to them, and queues
        reads and writes of block files immediately. Passes all other effects to the event loop together with
        `snapshot`.

        Called on the engine's thread.
        """
        if snapshot.is_transferring != self._was_transferring:
            self._was_transferring = snapshot.is_transferring
            # RuntimeError: the transfer thread has stopped, which it reports separately.
            with contextlib.suppress(RuntimeError):
                self._transfer_client.transfer.send(SetPolling(snapshot.is_transferring))
        others: list[Effect] = []
        for effect in effects:
            if isinstance(effect, StartRead):
                self._transfer_client.start_read(effect)
            elif isinstance(effect, TearDownPeer):
                self._transfer_client.tear_down(effect.source, effect.reason)
            elif isinstance(effect, ReadFiles | WriteFiles):
                assert self._file_cache is not None, "files are used without engine.file_cache_path"
                self._file_cache.submit(effect)
            else:
                others.append(effect)
        self._post(lambda: self._on_engine_report(others, snapshot))

    def on_kv_events(self, facts: Sequence[KVFact]) -> None:
        if self._publisher is not None:
            self._publisher.on_kv_events(facts)

    def ended(self, error: str | None) -> None:
        if error is not None:
            self._post(lambda: self._fail(f"the engine failed: {error}"))

    def _post(self, call: Callable[[], None]) -> None:
        """Queue a call for the event loop; on any thread."""
        # RuntimeError: the event loop is closed.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    # ---- on the event loop

    def _on_engine_report(self, effects: Sequence[Effect], snapshot: EngineSnapshot) -> None:
        try:
            self._carry_out(effects)
        except Exception as failure:
            # Gateways and engine disagree from now on.
            _log.exception("worker %s failed to carry out a command of its engine", self.me)
            self._fail(f"the engine failed: {type(failure).__name__}: {failure}")
        self._service.on_snapshot(snapshot)

    def _on_transfer_event(self, event: PeerLost | TransferStopped) -> None:
        if isinstance(event, PeerLost):
            self._producers.peer_lost(event.peer.worker)
            self._link_monitor.reports.suspect(event.peer.worker, self._clock.now())
        elif event.error is not None:
            self._fail(f"the transfer thread failed: {event.error}")

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        events: list[JobEvent] = []
        for effect in effects:
            if isinstance(effect, JobEvent):
                events.append(effect)
                continue
            match effect:
                case SendAnnouncement() | SendHandoffEnded():
                    self._handoffs.send(effect)
                case FollowHandoff() | RenewLeases() | SendRemainderRequest() | ReleaseHandoff():
                    self._producers.carry_out(effect)
                case JobEnded(times):
                    self._telemetry.job_ended(times)
                case _:
                    raise AssertionError(f"{effect} is carried out on the engine's thread")
        self._gateways.deliver(events)

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            _log.error("worker %s has failed and must be restarted: %s", self.me, reason)
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
        """Cancel the jobs of gateways that have been gone for the grace period."""
        while True:
            await asyncio.sleep(SWEEP_S)
            lost = self._gateways.sweep(self._clock.now())
            if lost:
                message = (
                    "the worker cancelled %d jobs, whose gateways have had no stream for %g s (worker.gateway_grace_s)"
                )
                _log.warning(message, len(lost), self._config.worker.gateway_grace_s)
            self._service.cancel(lost)

    async def _test_transfer(self) -> None:
        while True:
            await asyncio.sleep(SELF_TEST_PERIOD_S)
            await self._transfer_client.test()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._gateways.wake()

    async def _list_workers(self, registry: WorkerRegistry) -> Sequence[WorkerRecord]:
        """Return the registered workers, and close the KV connections to workers that are neither registered nor in use
        as sources."""
        records = await registry.list()
        self._transfer_client.keep(self._producers.sources | {record.worker for record in records})
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
            lanes=lane_labels(self._identity.lanes),
        )
        try:
            await keep_registered(registry, record, self._descriptor.set_role)
        finally:
            await registry.close()


def _describe(model: WorkerModel, me: WorkerRef, transport: Transport) -> TransportPeer:
    """Return what other workers need to read the KV of all ranks of this worker; opens the transfers of the ranks other
    than the first. Raises TandemError when a rank fails."""
    mine = transport.describe(me)
    return mine if model.rank_group is None else join_ranks([mine, *model.rank_group.open_transfers(me)])


def _bind(server: grpc.aio.Server, trust: PeerAuth, config: WorkerConfig) -> str:
    """Bind a port; returns the address to advertise."""
    where = f"{format_host(config.host)}:{config.port}"
    try:
        port = trust.listen(server, where)
    except RuntimeError as error:
        raise TandemError(
            ErrorKind.INVALID_REQUEST,
            f"cannot listen on {where}: {error}; set worker.host and --worker-port to a free address, or port 0",
            param="worker.port",
        ) from None
    return advertised_address(config, port, os.environ, default_route_address)


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
        transport_kind=config.transfer.backend,
        aliases=model.aliases,
        topology=Topology(config.worker.host_label, config.worker.rack, config.worker.zone),
        machine=machine_identity() if config.engine.nnodes == 1 else "",
        lanes=config.worker.served_lanes,
    )


def _file_cache(config: Config, model: WorkerModel, driver: EngineDriver, clock: Clock) -> FileCache | None:
    """Create the cache of KV blocks in files, in a directory for this model and file format below
    `engine.file_cache_path`, and return it; None if no path is set or the model has no host memory for blocks. Raises
    TandemError when `engine.file_cache_size` is smaller than one file."""
    engine, pool = config.engine, model.pool
    if not engine.file_cache_path or model.host is None:
        return None
    directory = Path(engine.file_cache_path) / f"{model.fingerprint}-{FORMAT}"
    try:
        files = BlockFiles(directory, pool.region.block_bytes, pool.layout.group.heads, engine.file_cache_size)
    except ValueError as error:
        message = f"engine.file_cache_size is too small: {error}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="engine.file_cache_size") from None
    return FileCache(files, model.host, driver.post, clock)


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
