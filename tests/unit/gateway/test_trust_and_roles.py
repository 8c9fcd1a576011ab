"""Test a gateway and workers that share a secret, and workers whose role changes while requests run on them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.core.events import Finished, FinishReason
from tandem.core.ids import Incarnation, WorkerRef
from tandem.core.lane import Lane
from tandem.gateway.workers import worker_link
from tandem.wire.peer_auth import PeerAuth
from tandem.wire.secret_file import SecretFile
from tests.certificates import Authority
from tests.unit.gateway.rig import Rig, collect, one_worker, pulled, token
from tests.unit.gateway.scripted_worker import ScriptedWorker, until

Make = Callable[..., Rig]


def keep(path: Path, secret: str) -> PeerAuth:
    fresh = path.with_suffix(".new")
    fresh.write_text(secret * 64 + "\n")
    return PeerAuth(path.name, SecretFile(fresh.replace(path)))


def lines_about(worker: ScriptedWorker, caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if str(worker.ref) in record.getMessage()]


async def test_a_gateway_with_another_secret_logs_it_once_and_connects_after_the_fix(
    make_rig: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.05)
    monkeypatch.setattr("tandem.wire.secret_file.LOOK_S", 0.05)
    rig = make_rig(trust=keep(tmp_path / "gateway", "b"))
    worker = await rig.add("w", "mixed", trust=keep(tmp_path / "worker", "a"))
    await rig.start()
    link = await until(lambda: rig.fleet._links.get(worker.ref.id))
    await until(lambda: link.is_gone)
    described = 0

    async def count() -> None:
        nonlocal described
        described += 1
        await real()

    real, link._describe = link._describe, count
    await until(lambda: described > 5)
    (line,) = lines_about(worker, caplog)
    assert line.startswith(f"worker {worker.ref} is lost: unauthenticated: it rejects our signature")
    assert "cluster.secret_file" in line and "clock" in line
    assert rig.dispatch.ready() == "no live worker" and worker.seen == []
    keep(tmp_path / "gateway", "a")
    await until(lambda: rig.dispatch.ready() is None)


async def test_a_worker_that_proves_nothing_is_not_used(
    make_rig: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker without proof may be an impostor: it gets no prompt and no stream."""
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.05)
    rig = make_rig(trust=keep(tmp_path / "gateway", "a"))
    worker = await rig.add("w", "mixed")
    await rig.start()
    await until(lambda: lines_about(worker, caplog))
    assert "does not prove" in lines_about(worker, caplog)[0]
    assert worker.positions == [] and worker.jobs == []


async def test_a_gateway_reconnects_with_new_certificates(
    make_rig: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new certificates come from another CA, which replaces the old one while a request runs."""
    monkeypatch.setattr(worker_link, "RECONNECT_S", 20.0)
    ours, fresh = (Authority(tmp_path / name).issue("all") for name in ("ours", "fresh"))
    rig = make_rig(trust=PeerAuth.of("g", ours))
    worker = await rig.add("w", "mixed", trust=PeerAuth.of("w", ours))
    await rig.start()
    await until(lambda: rig.dispatch.ready() is None)
    request = await rig.running()
    key = request.state.key
    worker.publish(token(key, 0))
    for name in ("tls_key_file", "tls_cert_file", "tls_ca_file"):
        shutil.copyfile(getattr(fresh, name), getattr(ours, name))
    link, watched = rig.fleet._links[worker.ref.id], len(worker.positions)
    before = link._channel
    worker.break_streams()
    await until(lambda: len(worker.positions) > watched)
    assert link._channel is not before
    worker.publish(token(key, 1), token(key, 2), Finished(key, FinishReason.LENGTH, 3, 0))
    assert await collect(request) == [0, 1, 2]


async def test_another_life_at_an_address_is_no_member_s_failure(
    make_rig: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker_link, "RECONNECT_S", 0.05)
    trust = keep(tmp_path / "secret", "a")
    rig = make_rig(trust=trust)
    worker = await rig.add("w", "mixed", trust=trust)
    listed = worker.ref
    worker.ref = WorkerRef(listed.id, Incarnation(listed.incarnation + 1000), listed.address)
    await rig.start()
    await until(lambda: any("another life of the worker" in line for line in lines_about(worker, caplog)))
    worker.ref = listed
    await until(lambda: rig.dispatch.ready() is None)


async def test_a_decode_worker_becomes_a_prefill_worker_and_what_runs_there_goes_on(rig: Rig) -> None:
    prefill, decode = await rig.pair()
    late = await rig.add("e", "decode")
    await until(lambda: (prefill.ref, late.ref) in rig.fleet.pairs.linked)
    running = await rig.running()
    key, place = running.state.key, running.state.placement
    assert place is not None
    source, other = (decode, late) if place.decode == decode.ref else (late, decode)
    source.role = "prefill"
    await until(lambda: {v.ref: v.pool for v in rig.fleet.views()}[source.ref] == "prefill")
    assert rig.fleet.candidates().pools("tiny", Lane.INTERACTIVE) == {"prefill": 2, "decode": 1}
    await until(lambda: (source.ref, other.ref) in rig.fleet.pairs.linked)
    prefill.publish(token(key, 0), Finished(key, None, 1, 0))
    source.publish(pulled(key), *(token(key, i) for i in range(3)), Finished(key, FinishReason.LENGTH, 3, 0))
    assert await collect(running) == [0, 1, 2]
    for _ in range(3):
        request = await rig.running()
        assert request.state.placement is not None
        assert request.path == "remote" and request.state.placement.decode == other.ref
        request.close()
    source.role = ""
    await until(lambda: rig.fleet.candidates().pools("tiny", Lane.INTERACTIVE) == {"prefill": 1, "decode": 2})


async def test_a_role_makes_room_for_what_waits(rig: Rig) -> None:
    """In strict mode only a pair can serve, and no pair exists before one of two prefill workers becomes a decode
    worker.
    """
    first, second = await rig.add("p", "prefill"), await rig.add("q", "prefill")
    await until(lambda: len(rig.fleet.views()) == 2)
    assert rig.dispatch.ready() == "model tiny has no live decode worker"
    second.role = "decode"
    await until(lambda: rig.dispatch.ready() is None)
    assert rig.fleet.pairs.linked == {(first.ref, second.ref)}


async def test_a_role_of_a_later_version_changes_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    worker = await rig.add("w", "mixed")
    worker.role = "encode"
    await until(lambda: rig.dispatch.ready() is None)
    assert [view.pool for view in rig.fleet.views()] == ["mixed"]
    assert caplog.text.count("'encode'") == 1


async def test_a_worker_that_is_bound_to_lanes_gets_only_their_requests(rig: Rig) -> None:
    batch, _ = await rig.add("b", "mixed", lanes=["batch"]), await rig.add("i", "mixed", lanes=["interactive"])
    await until(lambda: len(rig.fleet.views()) == 2)
    assert {view.ref.id: view.lanes for view in rig.fleet.views()} == {
        "b": frozenset({Lane.BATCH}), "i": frozenset({Lane.INTERACTIVE}),
    }  # fmt: skip
    for _ in range(4):
        request = await rig.running()
        assert request.state.placement is not None and request.state.placement.prefill.id == "i"
        request.close()
    assert not batch.jobs


async def test_a_worker_of_an_unknown_lane_is_not_used(rig: Rig) -> None:
    """A newer release may know more lanes; which of its requests a worker would take is not known here."""
    await rig.add("w", "mixed", lanes=["nightly"])
    await one_worker(rig, "i")
    assert [view.ref.id for view in rig.fleet.views()] == ["i"]
