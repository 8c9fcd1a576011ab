"""Run a request driver and its worker pool over scripted workers, with short waits."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer

from tandem.core.bundle import TokenizerBundle
from tandem.core.clock import SystemClock
from tandem.core.config import GatewayConfig, TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.events import Finished, FinishReason, JobEvent, KVReceived, SampledToken, Token
from tandem.core.ids import GatewayId, JobKey, RequestId, WorkerRef
from tandem.core.request import Job, PrefillJob, Request, ResumeJob, SamplingParams
from tandem.core.worker_load import WorkerLoad
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.orchestration import driver
from tandem.gateway.orchestration.active_request import ActiveRequest
from tandem.gateway.orchestration.driver import RequestDriver
from tandem.gateway.telemetry import deferred
from tandem.gateway.text.text_models import TextModels
from tandem.gateway.workers import worker_link, worker_pool
from tandem.gateway.workers.worker_pool import WorkerPool
from tandem.orchestration import request_queue
from tandem.orchestration.phase_ledger import PhaseLedger
from tandem.wire.peer_auth import PeerAuth
from tests.unit.gateway.scripted_worker import ScriptedWorker, until

SPECIAL_TOKENS = {"bos_token_id": 0, "bos_token": "<s>", "eos_token_ids": [1], "eos_token": "<|im_end|>"}
_numbers = itertools.count(1)


def bundle_of(
    tokenizer: Tokenizer, template: str = "", special: dict[str, Any] | None = None, config: Any = None
) -> TokenizerBundle:
    """Bundle the tests' tokenizer with its special tokens, changed by `special`, and a generation config."""
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template,
        generation_config_json=json.dumps(config or {}),
        special_tokens_json=json.dumps(SPECIAL_TOKENS | (special or {})),
    )


class Rig:
    """Own a gateway under test. `workers` is what the registry lists, unless `registry_fails`; `left_over` returns
    what the driver should have cleaned up.
    """

    def __init__(
        self,
        bundle: TokenizerBundle,
        quotas: Any = None,
        trust: PeerAuth | None = None,
        prefixes: Any = None,
        transfer: TransferConfig | None = None,
        **config: object,
    ) -> None:
        self.config = replace(GatewayConfig(), **config)  # type: ignore[arg-type]
        self.workers: list[ScriptedWorker] = []
        self.registry_fails = False
        self._bundle = bundle
        self.clock = clock = SystemClock()
        trust, transfer = trust or PeerAuth("g"), transfer or TransferConfig()
        self.fleet = WorkerPool(GatewayId("g"), self._discover, TextModels(), clock, self.config, trust, transfer)
        self.dispatch = RequestDriver(self.fleet, self.config, clock, quotas, prefixes=prefixes)

    async def start(self) -> None:
        await self.dispatch.start()
        await self.fleet.start()

    async def stop(self) -> None:
        await self.dispatch.stop()
        await self.fleet.stop()
        for worker in self.workers:
            await worker.stop()

    async def add(
        self,
        name: str,
        pool: str,
        *,
        works: bool = True,
        trust: PeerAuth | None = None,
        fingerprint: str = "f",
        lanes: Sequence[str] = (),
    ) -> ScriptedWorker:
        """Start a worker that accepts every job. A probe through it transfers its block, unless `works` is false."""
        worker = ScriptedWorker(name, pool, self._bundle, trust=trust)
        worker.fingerprint = fingerprint
        worker.lanes = lanes
        worker.after_submit = lambda job: probe_events(job) if works and is_probe(job) else ()
        self.workers.append(await worker.start())
        return worker

    async def pair(self) -> tuple[ScriptedWorker, ScriptedWorker]:
        """Start a prefill and a decode worker between which a probe block has been transferred."""
        prefill, decode = await self.add("p", "prefill"), await self.add("d", "decode")
        await until(lambda: self.dispatch.ready() is None)
        await until(lambda: not self.left_over())
        return prefill, decode

    def look(self, worker: ScriptedWorker) -> WorkerLoad:
        """Return the load that the gateway knows of a worker."""
        return next(view.load for view in self.fleet.views() if view.ref == worker.ref)

    async def open(
        self, caller: RequestContext | None = None, timeout_s: float | None = None, num_choices: int = 1
    ) -> ActiveRequest:
        sampling = SamplingParams(max_tokens=3, temperature=0.0)
        identity = RequestId(f"r{next(_numbers)}.")
        request = Request(
            id=identity, model="tiny", prompt_tokens=tuple(range(16)), sampling=sampling, num_choices=num_choices
        )
        caller = caller or RequestContext(request_id=identity, received_at=self.clock.now(), timeout_s=timeout_s)
        return await self.dispatch.open(request, caller, PhaseLedger(self.clock.now()))

    async def running(self, num_choices: int = 1) -> ActiveRequest:
        """Open a request and wait until both workers have accepted it."""
        request = await self.open(num_choices=num_choices)
        await until(lambda: request.state.phase.name == "RUNNING")
        return request

    def left_over(self) -> list[object]:
        return [*self.dispatch.director.requests(), *self.dispatch._submits]

    async def _discover(self) -> Mapping[WorkerRef, str]:
        if self.registry_fails:
            raise TandemError(ErrorKind.NO_WORKER, "the registry does not answer")
        return {worker.ref: worker.role for worker in self.workers}


@asynccontextmanager
async def rigs(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> AsyncIterator[Callable[..., Rig]]:
    """Build rigs, and check at the end that no driver has a request or a task left."""
    monkeypatch.setattr(worker_pool, "DISCOVERY_PERIOD_S", 0.02)
    monkeypatch.setattr(worker_pool, "SEARCH_PERIOD_S", 0.01)
    monkeypatch.setattr(worker_pool, "PROBE_RETRY_S", 0.05)
    monkeypatch.setattr(driver, "TICK_S", 0.02)
    monkeypatch.setattr(request_queue, "REFUSAL_BACKOFF_S", 0.02)
    monkeypatch.setattr(deferred, "DELAY_S", 0.05)
    monkeypatch.setattr(worker_link, "RETRY_S", 0.02)
    bundle = bundle_of(tokenizer)
    made: list[Rig] = []

    def make(quotas: Any = None, trust: PeerAuth | None = None, prefixes: Any = None, **config: object) -> Rig:
        made.append(Rig(bundle, quotas, trust, prefixes, **config))
        return made[-1]

    try:
        yield make
        for rig in made:
            await until(lambda rig=rig: not [work for work in rig.left_over() if "probe-" not in repr(work)])
    finally:
        for rig in made:
            await rig.stop()
    assert not [work for rig in made for work in rig.left_over()]


def is_probe(job: Job) -> bool:
    return str(job.request.id).startswith("probe")


def probe_events(job: Job) -> list[JobEvent]:
    """Return the events that the two workers of a successful probe publish."""
    if isinstance(job, PrefillJob):
        return [token(job.key, 0), Finished(job.key, None, 1, 0)]
    if isinstance(job, ResumeJob):
        return [pulled(job.key), token(job.key, 0), token(job.key, 1), Finished(job.key, FinishReason.LENGTH, 2, 0)]
    return []


def token(key: JobKey, index: int) -> Token:
    return Token(key, index, SampledToken(100 + index))


def pulled(key: JobKey) -> KVReceived:
    return KVReceived(key, 1, 64, 0, 64, 0.1, 0.1, 0.1)


async def collect(request: ActiveRequest) -> list[int]:
    """Return the indices of all tokens; raise the error that ends the request, if any."""
    return [event.index async for event in request if isinstance(event, Token)]


StartRig = Callable[..., Awaitable[Rig]]
"""Make a rig with the given settings, and start it."""


async def one_worker(rig: Rig, name: str = "m") -> ScriptedWorker:
    """Start a mixed worker, and wait until the gateway is ready with it."""
    worker = await rig.add(name, "mixed")
    await until(lambda: rig.dispatch.ready() is None)
    return worker


async def busy_pair(rig: Rig) -> tuple[ScriptedWorker, ScriptedWorker, ActiveRequest]:
    """Start a prefill and a decode worker, and a request that both have accepted."""
    prefill, decode = await rig.pair()
    return prefill, decode, await rig.running()


async def lose(rig: Rig, worker: ScriptedWorker) -> None:
    """Stop a worker that the registry no longer lists."""
    rig.workers.remove(worker)
    await worker.stop()


async def failure(request: ActiveRequest) -> TandemError:
    """Return the error that ends the request."""
    with pytest.raises(TandemError) as ended:
        await collect(request)
    return ended.value
