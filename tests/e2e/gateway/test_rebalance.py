"""Test that running and preempted sequences move to a decode worker that has nothing to do, token by token and with
their KV."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.gateway.http import Post, begin_streams, completion, send
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, Gateway, cluster, until

NUM_ANSWERS, NUM_TOKENS = 8, 2500


@pytest.fixture
def running(tmp_path: Path, redis_url: str, model: Path) -> Iterator[Cluster]:
    own = ("--namespace", tmp_path.name, "--worker-timeout-s", "30", "--gateway-grace-s", "30")
    with cluster(tmp_path, redis_url, model, *SETTINGS, *own) as running:
        yield running


def num_moves(gateway: Gateway, outcome: str) -> float:
    return gateway.metrics().get(f'tandem_rebalance_moves_total{{outcome="{outcome}"}}', 0.0)


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_answers_move_to_a_worker_that_begins_to_decode(running: Cluster, redis_url: str, tmp_path: Path) -> None:
    seats = ("--max-num-seqs", str(NUM_ANSWERS))
    arguments = (("p", "prefill"), ("d", "decode", *seats), ("e", "prefill", *seats))
    workers = []
    for name, pool, *settings in arguments:
        # One after the other, because each measures its speed as it starts.
        workers.append(running.worker(name, pool, *settings))
        workers[-1].wait_ready()
    _, crowded, joining = workers
    gateway = running.gateway("gateway", "--rebalance", "on", "--rebalance-min-gain", "0.01")
    gateway.wait_serving()
    bodies = [completion(40, salt, NUM_TOKENS, stream=True) for salt in range(NUM_ANSWERS)]
    with ExitStack() as stack:
        posts = begin_streams(stack, gateway.url, bodies, 3)
        # It is stopped meanwhile, because a fast worker would finish before the gateway knows the other one.
        crowded.signal(signal.SIGSTOP)
        joining.assign_role(redis_url, tmp_path.name, "decode")
        until(lambda: gateway.num_live("decode") == 2, "a second decode worker")
        crowded.signal(signal.SIGCONT)
        until(lambda: num_moves(gateway, "moved") >= 1, "a moved sequence")
        answers = [post.finish() for post in posts]
    retries = [int(answer.about()["path"].partition("retries=")[2] or 0) for answer in answers]
    # An answer that ends right after its move counts as ended.
    num_moved, num_ended = num_moves(gateway, "moved"), num_moves(gateway, "ended")
    assert num_moved <= sum(retries) <= num_moved + num_ended and max(retries) <= 2, (retries, gateway.log)
    with ExitStack() as stack:
        again = begin_streams(stack, gateway.url, bodies, 0)
        assert [answer.text() for answer in answers] == [post.finish().text() for post in again]
    for worker in workers:
        until(worker.is_idle, f"an idle {worker.name}")
    assert running.log_lines("ERROR") == []


@pytest.mark.timeout(240)
def test_a_preempted_answer_continues_on_a_worker_with_room(running: Cluster, redis_url: str, tmp_path: Path) -> None:
    seats = ("--max-num-seqs", "1")
    _, crowded, joining = workers = [
        running.worker(name, pool, *seats) for name, pool in (("p", "prefill"), ("d", "decode"), ("e", "prefill"))
    ]
    gateway = running.gateway("gateway", "--rebalance", "on")
    running.wait_serving()
    body, urgent_body = (completion(40, salt, NUM_TOKENS, stream=True) for salt in (1, 2))
    with Post(gateway.url, body, headers={"x-tandem-lane": "batch"}) as paused:
        paused.wait_events(3)
        with Post(gateway.url, urgent_body) as urgent:
            urgent.wait_events(3)
            assert crowded.books().num_sequences == 2, "one has the only seat, so the other is paused"
            # It is stopped meanwhile, because the urgent answer may end before the gateway knows the other worker.
            crowded.signal(signal.SIGSTOP)
            joining.assign_role(redis_url, tmp_path.name, "decode")
            until(lambda: gateway.num_live("decode") == 2, "a second decode worker")
            crowded.signal(signal.SIGCONT)
            until(lambda: num_moves(gateway, "resumed") == 1, "the preempted answer on the other worker")
            answers = [post.finish() for post in (paused, urgent)]
    facts = answers[0].about()
    assert facts["path"] == "remote;retries=1" and facts["preemptions"] >= 1 and facts["paused_ms"] > 0
    for answer, each in zip(answers, (body, urgent_body), strict=True):
        assert answer.text() == send(gateway.url, each | {"cache_salt": "undisturbed"}).text()
    for worker in workers:
        until(worker.is_idle, f"an idle {worker.name}")
    assert running.log_lines("ERROR") == []


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_answers_leave_a_worker_that_becomes_a_prefill_worker(running: Cluster, redis_url: str, tmp_path: Path) -> None:
    workers = [running.worker(name, pool) for name, pool in (("p", "prefill"), ("d", "decode"), ("e", "prefill"))]
    _, leaving, joining = workers
    gateway = running.gateway("gateway", "--rebalance", "on")
    running.wait_serving()
    bodies = [completion(40, salt, NUM_TOKENS, stream=True) for salt in range(3)]
    with ExitStack() as stack:
        posts = begin_streams(stack, gateway.url, bodies, 3)
        # It is stopped meanwhile, because a fast worker would finish before the gateway knows the new roles.
        leaving.signal(signal.SIGSTOP)
        joining.assign_role(redis_url, tmp_path.name, "decode")
        leaving.assign_role(redis_url, tmp_path.name, "prefill")
        until(lambda: gateway.num_live("prefill") == 2, "a second prefill worker")
        leaving.signal(signal.SIGCONT)
        until(lambda: num_moves(gateway, "moved") == len(bodies), "all sequences on the other worker")
        answers = [post.finish() for post in posts]
    assert {answer.about()["path"] for answer in answers} == {"remote;retries=1"}
    assert "its worker computes prompts only" in gateway.log
    for answer, body in zip(answers, bodies, strict=True):
        assert answer.text() == send(gateway.url, body | {"cache_salt": "undisturbed"}).text()
    for worker in workers:
        until(worker.is_idle, f"an idle {worker.name}")
    assert running.log_lines("ERROR") == []
