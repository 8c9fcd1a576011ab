"""Test that a whole gateway that stops tells the workers which of its jobs have ended."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tandem.core.ids import WorkerRef
from tandem.core.settings import build
from tandem.gateway.main import Gateway, new_name
from tests.unit.gateway.rig import bundle_of
from tests.unit.gateway.scripted_worker import ScriptedWorker, until


async def test_link_tests_in_progress_are_cancelled_at_their_workers(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(tokenizer)
    workers = [await ScriptedWorker(name, pool, bundle).start() for name, pool in (("p", "prefill"), ("d", "decode"))]

    async def discover(gateway: Gateway) -> dict[WorkerRef, str]:
        return {worker.ref: "" for worker in workers}

    monkeypatch.setattr(Gateway, "_discover", discover)
    settings = {"gateway.port": 0, "gateway.auth": "off", "redis.url": "redis://127.0.0.1:1"}
    gateway = Gateway(build([("test", settings)]), new_name())
    await gateway.start()
    await until(lambda: all(worker.verbs("probe-") for worker in workers))
    await gateway.stop()
    for worker in workers:
        assert worker.verbs("probe-")[-1] == "cancel"
        await worker.stop()
