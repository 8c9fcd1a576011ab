"""Test which sources a worker measures when it joins, and what it does while the registry or a source fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace

import pytest

from tandem.core.clock import SystemClock
from tandem.core.config import TransferConfig
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import WorkerRef
from tandem.core.link import LinkReport
from tandem.core.topology import Topology
from tandem.routing.link_policy import NUM_PEERS
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.worker_registry import WorkerRecord
from tandem.transfer.link_detection import LinkEndpoints
from tandem.worker.kv.handshake import SourceGone
from tandem.worker.links import link_monitor
from tandem.worker.links.link_monitor import LinkMonitor
from tests.unit.worker.conftest import ref, until

Answer = Callable[[WorkerRef], LinkReport]
INFO = SimpleNamespace(me=ref("me"), fingerprint="f")


def record(name: str, pool: str = "prefill", *, zone: str = "", fingerprint: str = "f", role: str = "") -> WorkerRecord:
    return WorkerRecord(
        worker=ref(name),
        pool=pool,
        model="m",
        fingerprint=fingerprint,
        layout="",
        max_model_len=1,
        bundle_digest="",
        role=role,
        topology=Topology(zone=zone),
    )


class RecordingProbe:
    """Record the sources to measure, and return what `answer` returns."""

    def __init__(self) -> None:
        self.measured: list[str] = []
        self.answer: Answer = lambda source: LinkReport(
            source=source, link_type="rdma", evidence="", num_bytes=10**9, seconds=0.1
        )

    async def measure(self, source: WorkerRef, num_bytes: int = 0) -> tuple[LinkReport, LinkEndpoints]:
        self.measured.append(source.id)
        return self.answer(source), LinkEndpoints("nixl", False, "cpu", "cpu")


Run = Callable[..., tuple[LinkMonitor, RecordingProbe]]


@pytest.fixture
async def run(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """Return `run(registry, transfer)`, which starts a link monitor that polls the registry."""
    monkeypatch.setattr(link_monitor, "BEAT_S", 0.001)
    monkeypatch.setattr(link_monitor, "LIST_S", 0.001)
    started: list[tuple[LinkMonitor, asyncio.Task[None]]] = []

    def begin(
        registry: Callable[[], Sequence[WorkerRecord]], transfer: TransferConfig | None = None
    ) -> tuple[LinkMonitor, RecordingProbe]:
        async def listed() -> Sequence[WorkerRecord]:
            return registry()

        probe = RecordingProbe()
        reads = SimpleNamespace(take_throughput=lambda num_bytes: {})
        one = LinkMonitor(INFO, transfer or TransferConfig(), probe, reads, SystemClock(), lambda: None)  # type: ignore[arg-type]
        started.append((one, asyncio.create_task(one.run(listed))))
        return one, probe

    yield begin
    for one, task in started:
        assert not task.done(), "it goes on whatever happens"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.close()


async def test_a_few_of_each_zone_that_may_prefill_for_it_are_measured_once(run: Run) -> None:
    looks: list[int] = []
    records = [
        *(record(f"p{n}", zone=f"z{n % 2}") for n in range(20)),
        *(record(f"d{n}", "decode") for n in range(5)),
        record("as-decode", role="decode", zone="z2"),
        record("as-prefill", "decode", role="prefill", zone="z3"),
        record("mixed", "mixed", zone="z4"),
        record("other", fingerprint="g", zone="z5"),
        record("me", "mixed", zone="z6"),
    ]

    def registry() -> Sequence[WorkerRecord]:
        looks.append(1)
        return records

    one, probe = run(registry)
    await until(lambda: len(looks) > 20)
    assert len(probe.measured) == len(set(probe.measured)) == 2 * NUM_PEERS + 2
    assert {"as-prefill", "mixed"} <= set(probe.measured)
    assert not {"as-decode", "other", "me"} & set(probe.measured)
    assert {report.source.id for report in one.reports.since(0)} == set(probe.measured)


async def test_a_registry_that_fails_changes_nothing_and_newcomers_are_measured(run: Run) -> None:
    listed: list[WorkerRecord] = []
    num_failures = 0

    def registry() -> Sequence[WorkerRecord]:
        nonlocal num_failures
        if not listed:
            num_failures += 1
            raise StoreUnavailable("down")
        return listed

    _, probe = run(registry)
    await until(lambda: num_failures > 3)
    assert probe.measured == []
    listed.append(record("p"))
    await until(lambda: probe.measured == ["p"])
    listed.append(record("q"))
    await until(lambda: probe.measured == ["p", "q"])


@pytest.mark.parametrize("is_defect", [False, True])
async def test_a_source_that_cannot_be_measured_stops_nothing(run: Run, is_defect: bool) -> None:
    def fail(source: WorkerRef) -> LinkReport:
        if source.id == "p0":
            raise ZeroDivisionError if is_defect else TandemError(ErrorKind.WORKER_LOST, "gone")
        return LinkReport(source=source, link_type="tcp", evidence="", num_bytes=10**9, seconds=1.0)

    one, probe = run(lambda: [record("p0"), record("p1")], TransferConfig(require="rdma"))
    probe.answer = fail
    await until(lambda: one.reports.find(ref("p1")) and one.reports.find(ref("p0")))
    reports = {report.source.id: report.problem for report in one.reports.since(0)}
    assert reports["p0"].startswith("it could not be measured: ")
    assert reports["p1"].startswith("transfer.require is rdma")
    with pytest.raises(ZeroDivisionError if is_defect else TandemError):
        await one.measure(ref("p0"))


async def test_a_worker_does_not_measure_itself(run: Run) -> None:
    one, probe = run(list)
    with pytest.raises(TandemError, match="this worker itself"):
        await one.measure(ref("me"))
    assert probe.measured == []


async def test_a_repeated_measurement_is_shared_unless_its_size_is_given(run: Run) -> None:
    one, probe = run(list)
    first = await one.measure(ref("p"))
    assert await one.measure(ref("p")) is first and probe.measured == ["p"]
    await one.measure(ref("p"), 1000)
    assert probe.measured == ["p", "p"]


async def test_an_ended_source_is_forgotten_and_another_is_chosen(run: Run) -> None:
    one, probe = run(lambda: [record("p")], TransferConfig(require="rdma"))
    await one.measure(ref("q"), 1)
    await until(lambda: one.reports.find(ref("p")))

    def gone(source: WorkerRef) -> LinkReport:
        raise SourceGone(f"{source} is another")

    probe.answer = gone
    for name in ("p", "q"):
        with pytest.raises(TandemError, match="is another") as failed:
            await one.measure(ref(name), 1)
        assert failed.value.kind is ErrorKind.WORKER_LOST
    assert [report.source.id for report in one.reports.since(0) if not report.num_bytes] == ["p"]
    assert one.reports.find(ref("q")) is None


def at(*gbps: float) -> Answer:
    """Return a probe answer with the first speed at the first call, the second at the next, and so on."""
    paces = iter(gbps)
    return lambda source: LinkReport(
        source=source, link_type="tcp", evidence="", num_bytes=10**9, seconds=1 / next(paces)
    )


@pytest.mark.parametrize(("paces", "is_refused"), [((20.0,), False), ((1.0, 20.0), False), ((1.0, 2.0), True)])
async def test_a_link_is_refused_after_two_slow_measurements_in_a_row(
    run: Run, monkeypatch: pytest.MonkeyPatch, paces: tuple[float, ...], is_refused: bool
) -> None:
    monkeypatch.setattr(link_monitor, "AGAIN_S", 0.0)
    one, probe = run(list, TransferConfig(min_gbps=10.0))
    probe.answer = at(*paces)
    report = await one.measure(ref("p"))
    assert report.refused is is_refused and len(probe.measured) == len(paces)
    assert one.reports.find(ref("p")) == report


@pytest.mark.parametrize("kind", [ErrorKind.DEADLINE, ErrorKind.OVERLOADED])
async def test_nothing_is_refused_for_lateness_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, kind: ErrorKind
) -> None:
    monkeypatch.setattr(link_monitor, "AGAIN_S", 0.0)
    one, probe = run(list, TransferConfig(min_gbps=10.0))

    def late(source: WorkerRef) -> LinkReport:
        raise TandemError(kind, "late")

    probe.answer = at(1.0, 1.0)
    await one.measure(ref("slow"))
    probe.answer = late
    for name in ("slow", "p"):
        with pytest.raises(TandemError, match="late"):
            await one.measure(ref(name), 1)
    reports = {report.source.id: report for report in one.reports.since(0)}
    assert reports["p"].problem and not reports["p"].refused
    assert reports["slow"].refused, "what was known against it still is"
