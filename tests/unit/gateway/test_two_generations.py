"""Test workers of two generations of one model behind one gateway, as during an upgrade that starts a second Ray
cluster: both serve, KV of two revisions does not mix, and the old workers leave without a failed request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.events import Finished, FinishReason
from tandem.core.request import ResumeJob
from tandem.gateway.orchestration.active_request import ActiveRequest
from tests.unit.gateway.rig import Rig, collect, is_probe, lose, pulled, token
from tests.unit.gateway.scripted_worker import ScriptedWorker, until

NUM_REQUESTS = 8


async def generation(rig: Rig, name: str, fingerprint: str) -> tuple[ScriptedWorker, ScriptedWorker]:
    """Start a prefill and a decode worker, and wait until a block has moved between them."""
    prefill = await rig.add(f"{name}-p", "prefill", fingerprint=fingerprint)
    decode = await rig.add(f"{name}-d", "decode", fingerprint=fingerprint)
    await until(lambda: any(is_probe(job) and job.source == prefill.ref for job in resumed(decode, probes=True)))
    await until(lambda: not rig.left_over())
    return prefill, decode


def resumed(decode: ScriptedWorker, *, probes: bool = False) -> list[ResumeJob]:
    return [job for job in decode.jobs if isinstance(job, ResumeJob) and is_probe(job) is probes]


async def finish(rig: Rig, request: ActiveRequest) -> list[int]:
    """Let the two workers of a running request compute it, and return the indices of its tokens."""
    key = request.state.key
    decode, job = next((worker, job) for worker in rig.workers for job in resumed(worker) if job.key == key)
    prefill = next(worker for worker in rig.workers if worker.ref == job.source)
    prefill.publish(token(key, 0), Finished(key, None, 1, 0))
    decode.publish(pulled(key), token(key, 1), token(key, 2), Finished(key, FinishReason.LENGTH, 3, 0))
    return sorted(await collect(request))


@pytest.mark.parametrize("revision", ["same", "other"])
async def test_an_old_generation_leaves_without_a_failed_request(rig: Rig, revision: str) -> None:
    old, new = await generation(rig, "old", "same"), await generation(rig, "new", revision)
    requests = [await rig.running() for _ in range(NUM_REQUESTS)]
    assert resumed(old[1]) and resumed(new[1]), "both generations get requests"
    if revision == "other":
        assert all({job.source for job in resumed(decode)} == {prefill.ref} for prefill, decode in (old, new))
    for worker in old:
        worker.load = replace(worker.load, draining=True)
        worker.publish()
    await until(lambda: sum(view.load.draining for view in rig.fleet.views()) == len(old))
    num_before = len(resumed(old[1]))
    requests += [await rig.running() for _ in range(NUM_REQUESTS)]
    assert len(resumed(old[1])) == num_before, "a draining worker gets no request"
    assert [await finish(rig, request) for request in requests] == [[0, 1, 2]] * len(requests)
    assert rig.dispatch.ready() is None
    for worker in old:
        await lose(rig, worker)
    await until(lambda: {view.ref for view in rig.fleet.views()} == {worker.ref for worker in new})
    assert rig.dispatch.ready() is None
    assert await finish(rig, await rig.running()) == [0, 1, 2]
    assert resumed(new[1])[-1].source == new[0].ref
