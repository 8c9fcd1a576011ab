"""Test how a gateway uses link reports of workers: refused pairs, pairs that miss requirements but are used, and pairs
that must be measured before use.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.admission.tenant import OPEN
from tandem.core.config import TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerId, WorkerRef
from tandem.core.link import LinkReport
from tandem.gateway.context.request_context import RequestContext
from tandem.gateway.gauges import watch_links
from tandem.gateway.workers import worker_link
from tandem.obs.metrics.instruments import TRANSFER_LINKS
from tandem.obs.metrics.metrics import Metrics
from tests.unit.gateway.rig import Rig, StartRig, collect
from tests.unit.gateway.scripted_worker import ScriptedWorker, until

SLOW = "transfer.min_gbps is 10, the link carries 1 gigabytes per second"
REQUIREMENTS = TransferConfig(min_gbps=10.0)


def report(source: WorkerRef, problem: str = "", *, refused: bool = False) -> LinkReport:
    return LinkReport(
        source=source, link_type="tcp", evidence="seen", num_bytes=10**9, seconds=1.0, problem=problem, refused=refused
    )


async def test_a_refused_pair_falls_back_and_the_path_names_the_reason(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    decode.links = [report(prefill.ref, SLOW, refused=True)]
    await until(lambda: not rig.fleet.pairs.linked)
    assert rig.fleet.pairs.refused.keys() == rig.fleet.pairs.failed.keys() == {(prefill.ref, decode.ref)}
    request = await rig.running()
    assert request.path == "fallback;reason=no_link_between_the_workers_meets_the_requirements"
    assert rig.dispatch.ready() is None and rig.dispatch.problem() == f"the link from p to d is not used: {SLOW}"
    request.close()
    metrics = Metrics()
    watch_links(metrics, rig.fleet.pairs)
    (family,) = [family for family in metrics.collect() if family.instrument is TRANSFER_LINKS]
    assert dict(family.points) == {("tcp", "false"): 1}
    decode.links = [report(prefill.ref)]
    await until(lambda: rig.fleet.pairs.linked)
    assert rig.dispatch.problem() is None
    request = await rig.running()
    assert request.path == "remote"
    request.close()


async def test_mixed_workers_whose_links_are_refused_run_requests_alone(rig: Rig) -> None:
    """Two mixed workers share no requests outside of strict mode, so their untested pair is not waited for."""
    prefill, first, second = await rig.add("p", "prefill"), await rig.add("m", "mixed"), await rig.add("n", "mixed")
    await until(lambda: len(rig.fleet.pairs.linked) == 2)
    for worker in (first, second):
        worker.links = [report(prefill.ref, SLOW, refused=True)]
    await until(lambda: len(rig.fleet.pairs.refused) == 2)
    request = await rig.running()
    assert request.path == "fallback;reason=no_link_between_the_workers_meets_the_requirements"
    request.close()


async def test_a_strict_request_does_not_wait_for_a_pair_that_is_never_tested(start_rig: StartRig) -> None:
    rig = await start_rig(no_worker_wait_s=0.1)
    await rig.add("m", "mixed"), await rig.add("n", "mixed")
    await until(lambda: len(rig.fleet.views()) == 2)
    caller = RequestContext(request_id="r", received_at=0.0, tenant=OPEN, disaggregation="strict", timeout_s=3.0)
    with pytest.raises(TandemError, match="no prefill worker"):
        await collect(await rig.open(caller))


async def test_in_strict_mode_a_refused_pair_makes_the_gateway_unready(start_rig: StartRig) -> None:
    rig = await start_rig(disaggregation="strict", no_worker_wait_s=0.1)
    prefill, decode = await rig.pair()
    decode.links = [report(prefill.ref, SLOW, refused=True)]
    await until(lambda: rig.dispatch.ready() == f"the link from p to d is not used: {SLOW}")
    with pytest.raises(TandemError, match="no link between the workers meets the requirements"):
        await collect(await rig.open())


async def test_a_link_that_misses_requirements_without_refusal_is_used_and_reported(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    decode.links = [report(prefill.ref, SLOW)]
    await until(lambda: rig.dispatch.problem() == f"the link from p to d misses its requirements: {SLOW}")
    assert rig.fleet.pairs.linked and rig.dispatch.ready() is None


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_required_speed_is_measured_before_a_pair_is_used(start_rig: StartRig, is_refused: bool) -> None:
    rig = await start_rig(transfer=REQUIREMENTS)
    prefill, decode = await rig.add("p", "prefill"), await rig.add("d", "decode")
    linked_before: list[bool] = []

    def measured(source: WorkerRef) -> LinkReport:
        linked_before.append(bool(rig.fleet.pairs.linked))
        return report(source, SLOW if is_refused else "", refused=is_refused)

    decode.on_measure = measured
    await until(lambda: rig.dispatch.ready() is None)
    assert linked_before == [False] and ("measure", prefill.ref) in decode.seen
    assert bool(rig.fleet.pairs.linked) is not is_refused
    assert bool(rig.fleet.pairs.refused) is is_refused


async def test_a_pair_that_cannot_be_measured_is_tried_again(start_rig: StartRig) -> None:
    rig = await start_rig(transfer=REQUIREMENTS)
    await rig.add("p", "prefill")
    decode = await rig.add("d", "decode")
    await until(lambda: [verb for verb, _ in decode.seen].count("measure") >= 2)
    assert rig.dispatch.ready() is not None
    decode.on_measure = report
    await until(lambda: rig.fleet.pairs.linked)


@pytest.mark.parametrize("transfer", [TransferConfig(), replace(REQUIREMENTS, on_slow_link="warn")])
async def test_no_measurement_is_requested_where_nothing_depends_on_it(
    start_rig: StartRig, transfer: TransferConfig
) -> None:
    rig = await start_rig(transfer=transfer)
    _, decode = await rig.pair()
    assert "measure" not in [verb for verb, _ in decode.seen]


async def test_a_refusal_outlives_the_stream_of_the_producer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer does not repeat its report when the source is lost and found again."""
    prefill, decode = await rig.pair()
    decode.links = [report(prefill.ref, SLOW, refused=True)]
    await until(lambda: rig.fleet.pairs.refused)
    decode.links = []
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.0)
    monkeypatch.setattr(worker_link, "RETRY_S", 0.01)
    lives = len(prefill.positions)
    prefill.break_streams()
    await until(lambda: len(prefill.positions) > lives and len(rig.fleet.views()) == 2)
    assert rig.fleet.pairs.refused.keys() == {(prefill.ref, decode.ref)} and not rig.fleet.pairs.linked


async def test_a_failed_measurement_is_reported(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    link = rig.fleet._links[decode.ref.id]
    with pytest.raises(TandemError, match="is not there") as refused:
        await link.measure(prefill.ref)
    assert refused.value.kind is ErrorKind.WORKER_LOST
    worker: ScriptedWorker = decode
    await worker.stop()
    with pytest.raises(TandemError, match="worker d: unavailable"):
        await link.measure(prefill.ref)


async def test_a_link_to_a_lost_worker_is_removed(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    gone = replace(prefill.ref, id=WorkerId("gone"))
    decode.links = [report(gone, SLOW, refused=True), report(prefill.ref, SLOW)]
    await until(lambda: rig.fleet.pairs.report((prefill.ref, decode.ref)))
    assert rig.fleet.pairs.report((gone, decode.ref)) is None
    assert rig.dispatch.problem() == f"the link from p to d misses its requirements: {SLOW}"
    assert not rig.fleet.pairs.failed


async def test_a_failed_measurement_is_requested_again_before_a_pair_is_used(
    start_rig: StartRig,
) -> None:
    rig = await start_rig(transfer=REQUIREMENTS)
    prefill, decode = await rig.add("p", "prefill"), await rig.add("d", "decode")
    decode.links = [report(prefill.ref, "it could not be measured: late")]
    await until(lambda: [verb for verb, _ in decode.seen].count("measure") >= 2)
    assert rig.fleet.pairs.report((prefill.ref, decode.ref)) is not None and not rig.fleet.pairs.linked
    decode.links, decode.on_measure = [report(prefill.ref)], report
    await until(lambda: rig.fleet.pairs.linked)
