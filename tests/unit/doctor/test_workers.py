"""Test the checks of workers, and reading their descriptions."""

from __future__ import annotations

import pytest

from tandem.core.clock import SystemClock, wall_ns
from tandem.doctor.workers import (
    WorkerFacts,
    WorkerList,
    judge_fingerprints,
    judge_roles,
    judge_workers,
    read_workers,
    skews_of,
)
from tandem.wire.gen import worker_pb2 as pb
from tests.ports import free_port
from tests.unit.doctor.cluster import Double, Listed, record, running, worker
from tests.unit.doctor.verdicts import assert_fails, assert_fine, assert_skips, assert_warns, verdicts

OTHER = "e" * 32
PAIR = WorkerList((worker("p", "prefill"), worker("d", "decode")))


async def test_workers_describe_themselves() -> None:
    description = pb.DescribeReply(
        role="decode",
        model="other",
        fingerprint=OTHER,
        wall_ns=wall_ns() - 7_000_000_000,
        redis_problem="it is silent",
        load=pb.Load(draining=True),
        transport_kind="nixl",
    )
    async with running(
        {"w0": Double(description), "w1": Double(pb.DescribeReply(role="mixed", model="smol"))}
    ) as listed:
        lost = record("w2", f"127.0.0.1:{free_port()}")
        worker_list = await read_workers(Listed([*listed.records, lost]), SystemClock())
    first, second, third = worker_list.workers
    assert (first.model, first.fingerprint, first.is_draining) == ("other", OTHER, True)
    assert first.role == "mixed", "that of the registry, which a worker learns some seconds later"
    assert (first.redis_problem, first.transport, second.is_live, second.skew) == ("it is silent", "nixl", True, None)
    assert first.layout == "3h x 30l"
    assert (third.is_live, third.role) == (False, "mixed") and third.problem.startswith("unavailable")
    (skew,) = skews_of(worker_list)
    assert skew.who == "w0" and skew.ahead_s <= -7.0 + skew.within_s, "the reply was old by then"


def test_those_that_answer_and_those_that_do_not() -> None:
    strange = worker("s", problem="unauthenticated: it rejects our signature", is_stranger=True)
    worker_list = WorkerList(
        (worker("a"), worker("b", is_draining=True), worker("c", problem="unavailable: refused"), strange)
    )
    live, lost, unknown = judge_workers(worker_list)
    assert_fine(live, "workers", "2 answer: a (mixed), b (mixed, draining)")
    assert_fails(lost, "workers", "c@c:1: unavailable: refused", "check that it runs and that c:1")
    assert_fails(unknown, "workers", "s@s:1: unauthenticated", "the same cluster.secret_file")


def test_a_worker_with_a_redis_error() -> None:
    _, finding = judge_workers(WorkerList((worker("a", redis_problem="no answer"),)))
    assert_warns(finding, "workers", "a reports a Redis error: no answer", "redis.url")


def test_no_workers() -> None:
    assert_warns(judge_workers(WorkerList())[0], "workers", "no worker is registered", "`tandem worker --redis-url URL")
    away = WorkerList(reason="the registry does not answer")
    for findings in (judge_workers(away), judge_fingerprints(away), judge_roles(away, "prefer")):
        assert_skips(findings[0], findings[0].check, "the registry does not answer")
    alone = WorkerList((worker("a", problem="gone"),))
    assert verdicts(judge_fingerprints(alone)) == [("fingerprints", "skip")]


def test_fingerprints_of_one_model_are_alike() -> None:
    worker_list = WorkerList((*PAIR.workers, worker("x", model="big", fingerprint=OTHER)))
    big, smol = judge_fingerprints(worker_list)
    assert_fine(big, "fingerprints", "big: eeeeeeeeeeee over nixl of all 1, blocks of 3h x 30l")
    assert_fine(smol, "fingerprints", "smol: ffffffffffff over nixl of all 2")


def test_fingerprints_that_differ() -> None:
    (finding,) = judge_fingerprints(WorkerList((*PAIR.workers, worker("x", fingerprint=OTHER))))
    found = "smol: KV moves only within each of ffffffffffff over nixl of d, p; eeeeeeeeeeee over nixl of x"
    assert_warns(finding, "fingerprints", found, "engine.kv_cache_dtype, engine.block_size")


def test_transports_that_differ() -> None:
    (finding,) = judge_fingerprints(WorkerList((*PAIR.workers, worker("x", transport="local"))))
    assert_warns(finding, "fingerprints", "ffffffffffff over local of x", "transfer.backend for all workers of a model")


def test_a_pair_of_roles_is_enough() -> None:
    assert_fine(judge_roles(PAIR, "strict")[0], "roles", "smol: 1 decode, 1 prefill")
    assert_fine(judge_roles(WorkerList((worker("a"),)), "strict")[0], "roles", "1 mixed")


def test_a_mixed_worker_prefills_for_a_decode_worker_only_with_strict() -> None:
    worker_list = WorkerList((worker("a"), worker("d", "decode")))
    assert_fine(judge_roles(worker_list, "strict")[0], "roles", "smol: 1 decode, 1 mixed")
    for mode in ("prefer", "auto"):
        found = "no worker of their kind prefills for another: no request is disaggregated"
        assert_warns(judge_roles(worker_list, mode)[0], "roles", found, "--pool prefill")


@pytest.mark.parametrize(("workers", "mode"), [(PAIR.workers[:1], "off"), ((worker("a"), worker("b")), "prefer")])
def test_no_role_is_missing_where_no_request_is_to_be_divided(workers: tuple[WorkerFacts, ...], mode: str) -> None:
    assert_fine(judge_roles(WorkerList(workers), mode)[0], "roles", "smol: ")


def test_a_missing_role() -> None:
    for worker_list, lacks, fix in (
        (WorkerList(PAIR.workers[:1]), "decodes", "`tandem role WORKER decode`"),
        (WorkerList(PAIR.workers[1:]), "prefills", "`tandem role WORKER prefill`"),
        (WorkerList((PAIR.workers[0], worker("d", "decode", is_draining=True))), "decodes", "`tandem drain d --undo`"),
        (WorkerList((PAIR.workers[0], worker("d", "decode", OTHER))), "decodes", "--pool decode"),
        (WorkerList((PAIR.workers[0], worker("d", "decode", transport="local"))), "decodes", "--pool decode"),
    ):
        assert_fails(judge_roles(worker_list, "strict")[0], "roles", f"no worker of their kind {lacks}", fix)
        assert_warns(judge_roles(worker_list, "prefer")[0], "roles", f"no worker of their kind {lacks}", fix)
