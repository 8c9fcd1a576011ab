"""Test real processes that share a secret or use certificates, and operator commands on their workers."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.wire.peer_auth import PeerAuth
from tandem.wire.secret_file import SecretFile
from tests.certificates import Authority
from tests.e2e.cluster import PATIENCE_S
from tests.e2e.gateway.http import LONG_ANSWER, Answer, Post, completion, send
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, Gateway, Worker, cluster, until

NUM_PROMPTS = 6


def complete(gateway: Gateway, salt: int) -> Answer:
    return send(gateway.url, completion(40, salt, 24))


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@contextmanager
def load(gateway: Gateway, expected: dict[int, str]) -> Iterator[list[str]]:
    """Send requests one after another on three connections; yield the list of failures, which should stay empty."""
    wrong: list[str] = []
    is_over = threading.Event()

    def run(salt: int) -> None:
        while not is_over.is_set():
            answer = complete(gateway, salt)
            if answer.status != 200 or answer.json()["choices"][0]["text"] != expected[salt]:
                wrong.append(f"{answer.status}: {answer.json()}")
            salt = (salt + 1) % NUM_PROMPTS

    threads = [threading.Thread(target=run, args=(salt,)) for salt in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def start(running: Cluster, trust: PeerAuth, *pools: tuple[str, str]) -> tuple[Gateway, dict[str, Worker]]:
    workers = {name: running.worker(name, pool) for name, pool in pools}
    gateway = running.gateway("gateway")
    running.wait_serving()
    for worker in workers.values():
        worker.trust = trust
    until(lambda: complete(gateway, 0).headers["x-tandem-path"] == "remote", "a request that is split")
    return gateway, workers


@pytest.mark.nightly
@pytest.mark.timeout(150)
def test_a_cluster_with_a_secret_and_an_operator(tmp_path: Path, redis_url: str, model: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("s" * 64 + "\n")
    wrong.write_text("w" * 64 + "\n")
    here = ("--redis-url", redis_url, "--namespace", "trust", "--secret-file", str(secret))
    with cluster(tmp_path, redis_url, model, *SETTINGS, *here[2:]) as running:
        trust = PeerAuth("test", SecretFile(secret))
        pools = (("p", "prefill"), ("d", "decode"), ("e", "decode"))
        gateway, workers = start(running, trust, *pools)
        stranger = running.gateway("stranger", "--secret-file", str(wrong))
        expected = {salt: complete(gateway, salt).json()["choices"][0]["text"] for salt in range(NUM_PROMPTS)}
        assert len(set(expected.values())) == NUM_PROMPTS
        with load(gateway, expected) as failures:
            _change_roles(here, workers, lambda: complete(gateway, 0).headers["x-tandem-path"])
            _rotate(secret, gateway)
        assert failures == []
        for worker in workers.values():
            until(worker.is_idle, f"an idle {worker.name} after the load")
        _drain_one(here, gateway, workers, wrong)
        for worker in workers.values():
            until(worker.is_idle, f"an idle {worker.name}")
        stranger.wait_ready()
        until(lambda: stranger.log.count("is lost: unauthenticated") == 3, "what a stranger is told")
        assert stranger.missing() == "no live worker"
        for program in (gateway, *workers.values()):
            assert not [line for line in program.complaints() if "is refused: it is signed with another" not in line]
        for worker in workers.values():
            # Once per minute, and this takes less than three; the stranger has called some hundred times.
            assert 1 <= worker.log.count("it is signed with another secret") <= 3
        assert all("s" * 64 not in program.log and "w" * 64 not in program.log for program in running.programs)


def _change_roles(here: tuple[str, ...], workers: dict[str, Worker], path: Callable[[], str]) -> None:
    listed = tandem("role", *here)
    assert listed.returncode == 0, listed.stderr
    rows = [line.split() for line in listed.stdout.splitlines()]
    assert rows[0] == ["WORKER", "POOL", "ROLE", "LANES", "INCARNATION", "ADDRESS", "STATE"]
    assert [row[:3] for row in rows[1:]] == [
        ["d", "decode", "decode"],
        ["e", "decode", "decode"],
        ["p", "prefill", "prefill"],
    ]
    assert all(row[6] == "live," for row in rows[1:])
    assert tandem("role", "e", "prefill", *here).stdout == "e: decode -> prefill (pool decode)\n"
    until(lambda: "e@" in workers["e"].log and "role prefill" in workers["e"].log, "a heartbeat's answer")
    description = workers["e"].describe()
    assert (description.pool, description.role) == ("decode", "prefill")
    assert not workers["e"].describe().load.draining
    # The only other prefill worker now decodes: prompts can be computed on `e` alone.
    assert tandem("role", "p", "decode", *here).returncode == 0
    until(lambda: path() == "remote" and workers["p"].describe().role == "decode", "a pair of the new roles")
    assert {line.split()[0]: line.split()[2] for line in tandem("role", *here).stdout.splitlines()[1:]} == {
        "d": "decode",
        "e": "prefill",
        "p": "decode",
    }


def _rotate(secret: Path, gateway: Gateway) -> None:
    """All processes share the file here; each notices a change at its own poll."""
    for lines in ("s" * 64 + "\n" + "t" * 64, "t" * 64 + "\n" + "s" * 64):
        fresh = secret.with_suffix(".new")
        fresh.write_text(lines + "\n")
        fresh.replace(secret)
        for _ in range(4):
            assert complete(gateway, 0).status == 200


def _drain_one(here: tuple[str, ...], gateway: Gateway, workers: dict[str, Worker], wrong: Path) -> None:
    with Post(gateway.url, completion(40, 99, LONG_ANSWER, stream=True)) as post:
        post.wait_events(2)
        busy = [worker for worker in workers.values() if worker.describe().load.num_running]
        drained = busy[-1].name
        left = tandem("drain", drained, "--timeout", "0", *here)
        assert left.returncode == 1
        assert left.stdout == f"{drained} accepts no new jobs; 1 jobs and leases are left after 0 s\n"
        # What runs there moves to the others meanwhile.
        rows = {row.split()[0]: row for row in tandem("role", *here).stdout.splitlines()}
        assert "draining" in rows[drained]
    done = tandem("drain", drained, "--timeout", "30", *here)
    assert (done.returncode, done.stdout) == (0, f"{drained} accepts no new jobs; no jobs and leases are left\n")
    undone = tandem("drain", drained, "--undo", *here)
    assert (undone.returncode, undone.stdout) == (0, f"{drained} accepts new jobs again\n")
    assert "draining" not in tandem("role", *here).stdout
    missing = tandem("drain", "nobody", *here)
    assert missing.returncode == 1 and "'nobody'" in missing.stderr and "d, e, p" in missing.stderr
    assert tandem("role", "d", *here).returncode == 2
    refused = tandem("role", *here[:-1], "/nowhere")
    assert refused.returncode == 2 and "cluster.secret_file: cannot read /nowhere" in refused.stderr
    strange = tandem("role", *here[:-1], str(wrong)).stdout.splitlines()[1:]
    assert len(strange) == 3 and all("unreachable: unauthenticated: it rejects our signature" in row for row in strange)


@pytest.mark.timeout(120)
def test_a_cluster_with_certificates(tmp_path: Path, redis_url: str, model: Path) -> None:
    """The cluster also has a secret: each guards on its own, and both work together."""
    secret = tmp_path / "secret"
    secret.write_text("s" * 64 + "\n")
    ours = Authority(tmp_path / "ours").issue("worker")
    certificate = ("--tls-cert-file", ours.tls_cert_file, "--tls-key-file", ours.tls_key_file)
    tls = (*certificate, "--tls-ca-file", ours.tls_ca_file)
    here = ("--redis-url", redis_url, "--namespace", "tls", "--secret-file", str(secret), *tls)
    with cluster(tmp_path, redis_url, model, *SETTINGS, *here[2:]) as running:
        running.worker("p", "prefill")
        running.worker("d", "decode")
        gateway = running.gateway("gateway")
        running.wait_serving()
        until(lambda: complete(gateway, 0).headers["x-tandem-path"] == "remote", "a request that is split")
        assert [line.split()[6] for line in tandem("role", *here).stdout.splitlines()[1:]] == ["live,", "live,"]
        plain = tandem("role", *here[:6])
        assert [line.split()[6] for line in plain.stdout.splitlines()[1:]] == ["unreachable:", "unreachable:"]


def test_a_worker_that_strangers_reach_does_not_start_without_a_secret(model: Path) -> None:
    refused = tandem("worker", "--model", str(model), "--worker-host", "0.0.0.0")
    assert refused.returncode == 2
    assert "worker.host 0.0.0.0" in refused.stderr and "--secret-file" in refused.stderr
