"""Serve the worker's gRPC API on a local port with scripted replies and no model."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import JobEvent
from tandem.core.ids import Incarnation, JobKey, WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.core.request import Job, PrefillJob, ResumeJob
from tandem.core.worker_load import WorkerLoad
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.wire.job_codec import decode_key, decode_submission
from tandem.wire.kv_codec import decode_handoff_key, decode_worker, encode_worker
from tandem.wire.link_codec import encode_link
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.worker_codec import encode_load, encode_refusal, encode_update

PATIENCE_S = 20.0
_incarnations = itertools.count(1)

Answer = tuple[ErrorKind, str] | None

BLOCK_SIZE = 8
"""Tokens per KV block, as every scripted worker reports it."""


class ScriptedWorker(WorkerServicer):
    """Own one scripted worker. `on_submit` decides about a job: None accepts it, anything else is the reason of the
    refusal. `publish` sends events to every open watch stream.

    `role` is the role in the worker's registry record. `mute` stops the stream's heartbeat; `seen` holds (verb,
    subject) of all calls in order. `links` go with each message of the stream; `on_measure` answers link probes.
    """

    def __init__(self, name: str, pool: str, bundle: TokenizerBundle, trust: PeerAuth | None = None) -> None:
        self.name = name
        self.pool = pool
        self.role = ""
        self.load = WorkerLoad(num_blocks=64, num_free_blocks=64)
        self.seen: list[tuple[str, Any]] = []
        self.jobs: list[Job] = []
        self.positions: list[dict[JobKey, int]] = []
        self.on_submit: Callable[[Job], Answer] = lambda job: None
        self.after_submit: Callable[[Job], Sequence[JobEvent]] = lambda job: ()
        self.hold_submit: asyncio.Event | None = None
        self.mute = False
        self.links: list[LinkReport] = []
        self.on_measure: Callable[[WorkerRef], LinkReport | TandemError] = lambda source: TandemError(
            ErrorKind.WORKER_LOST, f"{source} is not there"
        )
        self.max_model_len = 512
        self.metrics_address = ""
        self.lanes: Sequence[str] = ()
        self.fingerprint = "f"
        self.ref = WorkerRef(WorkerId(name), Incarnation(next(_incarnations)), "")
        self._bundle = bundle
        self._streams: list[asyncio.Queue[Sequence[JobEvent] | None]] = []
        self._trust = trust or PeerAuth(name)
        self._server = self._trust.server(self.ref.incarnation)

    async def start(self) -> ScriptedWorker:
        add_WorkerServicer_to_server(self, self._server)
        port = self._trust.listen(self._server, "127.0.0.1:0")
        self.ref = WorkerRef(self.ref.id, self.ref.incarnation, f"127.0.0.1:{port}")
        await self._server.start()
        return self

    async def stop(self) -> None:
        self.break_streams()
        await self._server.stop(0)

    # ---- what a test does

    def publish(self, *events: JobEvent) -> None:
        assert self._streams, f"nobody watches {self.name}"
        self._streams[-1].put_nowait(events)

    def break_streams(self) -> None:
        for stream in self._streams:
            stream.put_nowait(None)
        self._streams.clear()

    def verbs(self, request: str) -> list[str]:
        """Return the verbs of all calls about a request, in order."""
        return [verb for verb, what in self.seen if request in str(what)]

    # ---- the service

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        reply = pb.DescribeReply(
            pool=self.pool, model="tiny", fingerprint=self.fingerprint, max_model_len=self.max_model_len
        )
        reply.transport.layout.block_size = BLOCK_SIZE
        reply.worker.CopyFrom(encode_worker(self.ref))
        reply.role = self.role
        reply.lanes.extend(self.lanes)
        reply.metrics_address = self.metrics_address
        reply.bundle_digest = self._bundle.digest
        if request.with_bundle:
            for field in ("tokenizer_json", "chat_template", "generation_config_json", "special_tokens_json"):
                setattr(reply.bundle, field, getattr(self._bundle, field))
        self._trust.sign_reply(context.invocation_metadata(), reply)
        return reply

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        job = decode_submission(request).job
        self.jobs.append(job)
        kind = "prefill" if isinstance(job, PrefillJob) else "resume" if isinstance(job, ResumeJob) else "generate"
        self.seen.append((kind, job.key))
        if self.hold_submit is not None and not str(job.request.id).startswith("probe"):
            await self.hold_submit.wait()
        answer = self.on_submit(job)
        reply = pb.SubmitReply()
        reply.load.CopyFrom(encode_load(self.load))
        if answer is not None:
            reply.refusal.CopyFrom(encode_refusal(*answer))
        else:
            events = self.after_submit(job)
            if events:
                self.publish(*events)
        return reply

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelReply:
        self.seen += [("cancel", decode_key(key)) for key in request.keys]
        return pb.CancelReply()

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseReply:
        self.seen.append(("release", decode_handoff_key(request.key)))
        return pb.ReleaseReply()

    async def ProbeLink(self, request: pb.ProbeLinkRequest, context: Any) -> pb.ProbeLinkReply:
        source = decode_worker(request.source)
        self.seen.append(("measure", source))
        answer = self.on_measure(source)
        if isinstance(answer, TandemError):
            return pb.ProbeLinkReply(refusal=encode_refusal(answer.kind, answer.message))
        return pb.ProbeLinkReply(report=encode_link(answer))

    def _update(self, events: Sequence[JobEvent]) -> pb.WatchUpdate:
        update = encode_update(events, self.load)
        update.links.extend(map(encode_link, self.links))
        return update

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchUpdate]:  # type: ignore[override]
        self.positions.append({decode_key(p.key): p.next_index for p in request.positions})
        stream: asyncio.Queue[Sequence[JobEvent] | None] = asyncio.Queue()
        self._streams.append(stream)
        yield self._update(())
        while True:
            try:
                events = await asyncio.wait_for(stream.get(), 0.05)
            except TimeoutError:
                if not self.mute:
                    yield self._update(())
                continue
            if events is None:
                return
            yield self._update(events)


async def until(condition: Callable[[], Any]) -> Any:
    """Wait until a condition on what was seen holds, and return its value."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := condition()):
            await asyncio.sleep(0.005)
        return found
