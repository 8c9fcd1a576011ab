"""Run a worker without a model for benchmarks of the gateway; its tokens come from a list, one message per step.

    python -m loadtest.gateway.fake_worker [--step-ms 0]

With a step of 0 ms the next message is made when the gateway can accept it. The worker prints its id and address on
stdout and serves until stdin ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
import uvloop

from loadtest.gateway.instant_backend import BY_STEP, MAX_MODEL_LEN, answer_ids, bundle
from tandem.core.events import Finished, FinishReason, JobEvent, SampledToken, Token
from tandem.core.ids import Incarnation, JobKey, WorkerId, WorkerRef
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.text.text_model import TextModel
from tandem.wire.channels import SERVER_OPTIONS
from tandem.wire.gen import worker_pb2 as pb
from tandem.wire.gen.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.wire.job_codec import decode_key, decode_submission
from tandem.wire.kv_codec import encode_worker
from tandem.wire.worker_codec import encode_bundle, encode_load, encode_update

BEAT_S = 1.0


class FakeWorker(WorkerServicer):
    """Worker of one gateway that gives every running job one token per step."""

    def __init__(self, step_s: float) -> None:
        self.address = ""
        self._step_s = step_s
        self._bundle = bundle()
        self._ids = answer_ids(TextModel(self._bundle), 1024)
        self._load = WorkerLoad(num_blocks=1 << 20, num_free_blocks=1 << 20)
        self._jobs: dict[JobKey, tuple[int, int]] = {}
        self._has_work = asyncio.Event()

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeReply:
        reply = pb.DescribeReply(pool="mixed", model=BY_STEP, fingerprint="f", max_model_len=MAX_MODEL_LEN)
        reply.worker.CopyFrom(encode_worker(WorkerRef(WorkerId("door"), Incarnation(1), self.address)))
        reply.bundle_digest = self._bundle.digest
        if request.with_bundle:
            reply.bundle.CopyFrom(encode_bundle(self._bundle))
        return reply

    async def Submit(self, request: pb.SubmitRequest, context: Any) -> pb.SubmitReply:
        job = decode_submission(request).job
        self._jobs[job.key] = (0, job.request.sampling.max_tokens)
        self._has_work.set()
        return pb.SubmitReply(load=encode_load(self._load))

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelReply:
        for key in request.keys:
            self._jobs.pop(decode_key(key), None)
        return pb.CancelReply()

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchUpdate]:
        yield encode_update((), self._load)
        while True:
            if not self._jobs:
                self._has_work.clear()
                try:
                    await asyncio.wait_for(self._has_work.wait(), BEAT_S)
                except TimeoutError:
                    yield encode_update((), self._load)
                    continue
            yield encode_update(self._step())
            await asyncio.sleep(self._step_s)

    def _step(self) -> list[JobEvent]:
        events: list[JobEvent] = []
        for key, (index, stop) in list(self._jobs.items()):
            events.append(Token(key, index, SampledToken(self._ids[index % len(self._ids)])))
            self._jobs[key] = (index + 1, stop)
            if index + 1 == stop:
                events.append(Finished(key, FinishReason.LENGTH, stop, 0))
                del self._jobs[key]
        return events


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="loadtest.gateway.fake_worker")
    parser.add_argument("--step-ms", type=float, default=0.0)
    uvloop.run(_serve(parser.parse_args(argv).step_ms / 1e3))
    return 0


async def _serve(step_s: float) -> None:
    worker, server = FakeWorker(step_s), grpc.aio.server(options=SERVER_OPTIONS)
    add_WorkerServicer_to_server(worker, server)
    worker.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    sys.stdout.write(json.dumps({"worker": f"door@{worker.address}"}) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    sys.exit(main())
