"""Test how the dispatcher uses the prefix index: block hashes go into the queue with the request, and the prediction
is compared with the first report once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from tandem.core.events import Finished, FinishReason, SampledToken, Token
from tandem.core.ids import BlockHash, WorkerRef
from tandem.core.request import PrefillJob, Request
from tandem.orchestration.request_queue import Dispatchable
from tandem.routing.cost import RemotePrefixPlan
from tandem.routing.prefix_accuracy import Prediction
from tandem.routing.prefix_index import PrefixHit
from tandem.routing.worker_view import Pair
from tests.unit.gateway.rig import StartRig, collect, one_worker, pulled, token
from tests.unit.gateway.scripted_worker import until

NAMES = (BlockHash(b"a" * 16), BlockHash(b"b" * 16))


class Known:
    """Predict for every worker as many blocks as a test sets."""

    def __init__(self) -> None:
        self.held: dict[WorkerRef, int] = {}
        self.matched: list[Sequence[BlockHash]] = []
        self.reports: list[tuple[Prediction, int]] = []

    def match(self, hashes: Sequence[BlockHash]) -> Mapping[WorkerRef, PrefixHit]:
        self.matched.append(hashes)
        return {worker: PrefixHit(num, num) for worker, num in self.held.items()}

    async def name(self, request: Request) -> Sequence[BlockHash]:
        return NAMES

    def reported(self, predicted: Prediction, num_cached: int) -> None:
        self.reports.append((predicted, num_cached))


async def test_the_worker_that_computes_is_compared_once(start_rig: StartRig) -> None:
    known = Known()
    rig = await start_rig(prefixes=known)
    prefill, decode = await rig.pair()
    known.held = {prefill.ref: 2, decode.ref: 1}
    request = await rig.running()
    assert known.matched == [NAMES] and not known.reports
    key = request.state.key
    prefill.publish(Token(key, 0, SampledToken(100), num_cached_tokens=5), Finished(key, None, 1, 5))
    await until(lambda: known.reports)
    decode.publish(Token(key, 0, SampledToken(100), num_cached_tokens=5), token(key, 1))
    decode.publish(token(key, 2), Finished(key, FinishReason.LENGTH, 3, 5))
    await collect(request)
    assert known.reports == [(Prediction(prefill.ref, 8, 8), 5)], "the last token of a prompt is always computed"
    assert not [*rig.dispatch.director._queue.known()]


async def test_without_a_prediction_nothing_is_compared(start_rig: StartRig) -> None:
    known = Known()
    rig = await start_rig(prefixes=known)
    worker = await one_worker(rig)
    request = await rig.running()
    key = request.state.key
    worker.publish(Token(key, 0, SampledToken(100), num_cached_tokens=0), Finished(key, FinishReason.STOP, 1, 0))
    await collect(request)
    assert known.matched == [NAMES] and not known.reports


async def test_the_outcome_of_a_prefix_fetch_is_reported(start_rig: StartRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted workers have no free blocks, so no fetch would be planned: the test sets the placements."""
    rig = await start_rig(prefixes=Known())
    prefill, decode = await rig.pair()
    link = (decode.ref, prefill.ref)
    outcomes: list[tuple[Pair, bool]] = []
    monkeypatch.setattr(
        rig.dispatch.director._queue,
        "on_prefix_fetch",
        lambda link, has_arrived, now: outcomes.append((link, has_arrived)),
    )
    turns = rig.dispatch.director._queue.turns

    def turns_with_prefix_fetch(now: float) -> Iterator[Dispatchable]:
        for turn in turns(now):
            placement = replace(turn.placement, prefix=RemotePrefixPlan(decode.ref, 2, 16, 16, 0.0))
            yield turn._replace(placement=placement, predicted=[Prediction(decode.ref, 16, 8)])

    monkeypatch.setattr(rig.dispatch.director._queue, "turns", turns_with_prefix_fetch)
    for num_cached in (0, 16):
        request = await rig.running()
        job = prefill.jobs[-1]
        assert isinstance(job, PrefillJob) and job.prefix is not None and job.prefix.source == decode.ref
        key = request.state.key
        prefill.publish(Token(key, 0, SampledToken(100), num_cached_tokens=num_cached), Finished(key, None, 1, 0))
        await until(lambda num=num_cached: len(outcomes) == 1 + (num > 0))
        decode.publish(
            token(key, 0), pulled(key), token(key, 1), token(key, 2), Finished(key, FinishReason.LENGTH, 3, 0)
        )
        await collect(request)
    assert outcomes == [(link, False), (link, True)]
