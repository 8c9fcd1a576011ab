"""Test a worker whose model runs on two ranks, behind a real gateway: it returns the tokens of one rank, and requests,
processes and files are cleaned up when a rank dies.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.gateway.http import Post, completion, send
from tests.e2e.gateway.pair import SETTINGS
from tests.e2e.gateway.processes import Cluster, Worker, cluster, until
from tests.pids import is_running

pytestmark = pytest.mark.timeout(240)

PROMPTS = (1, 16, 100, 700)
RANKED = ("--tensor-parallel", "2")
PATIENT = ("--worker-timeout-s", "60", "--gateway-grace-s", "60")
"""Settings with which a worker that is stopped for a while is not lost."""


@pytest.fixture
def running(tmp_path: Path, redis_url: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Ranks meet in a directory of this test. In float64, where the order of sums decides no token."""
    with tempfile.TemporaryDirectory(prefix="tp-") as short:
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setenv("TMPDIR", short)
        own = ("--dtype", "float64", "--namespace", Path(short).name)
        with cluster(tmp_path, redis_url, model, *SETTINGS, *own) as running:
            yield running
        assert list(Path(short).glob("tandem-ranks-*")) == []


def follower_of(worker: Worker) -> int:
    """Return the process of the worker's second rank."""
    for entry in Path("/proc").iterdir():
        try:
            parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == worker.pid and b"tandem.worker.rank_process" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except (OSError, IndexError, ValueError):
            continue
    raise AssertionError(f"{worker.name} has no second rank: {worker.log}")


def complete_all(url: str) -> list[str]:
    """Send all requests at once, so that they share steps."""
    with ExitStack() as stack:
        bodies = [completion(length, 900 + length, 24, cache_salt="all") for length in PROMPTS]
        posts = [stack.enter_context(Post(url, body)) for body in bodies]
        return [post.finish().text() for post in posts]


def test_two_ranks_serve_and_what_one_of_them_leaves_goes_on_elsewhere(running: Cluster) -> None:
    gateway, ranked = running.gateway("gateway", *PATIENT), running.worker("ranked", "mixed", *RANKED, *PATIENT)
    running.wait_serving()
    by_two = complete_all(gateway.url)
    until(ranked.is_idle, "an idle worker")
    body = completion(20, 950, 150)
    with Post(gateway.url, body | {"stream": True}) as post:
        post.wait_events(5)
        # It is stopped meanwhile, because it would finish before another worker exists.
        ranked.signal(signal.SIGSTOP)
        alone = running.worker("alone", "mixed")
        alone.wait_ready()
        until(lambda: gateway.num_live("mixed") == 2, "both workers")
        os.kill(follower_of(ranked), signal.SIGKILL)
        ranked.signal(signal.SIGCONT)
        answer = post.finish()
    assert answer.error() is None and answer.about()["attempts"] == 2, answer.about()
    assert ranked.wait() == 1 and "rank 1 is gone" in ranked.log and "Traceback" not in ranked.log
    assert complete_all(gateway.url) == by_two
    assert send(gateway.url, body).text() == answer.text()
    until(alone.is_idle, "an idle worker")
    assert alone.stop() == 0


@pytest.mark.nightly
def test_the_second_rank_ends_with_the_first(running: Cluster) -> None:
    killed, stopped = running.worker("killed", "mixed", *RANKED), running.worker("stopped", "mixed", *RANKED)
    for worker, end in ((killed, killed.kill), (stopped, stopped.stop)):
        worker.wait_ready()
        follower = follower_of(worker)
        end()
        until(lambda pid=follower: not is_running(pid), f"the end of the second rank of {worker.name}")
    assert stopped.exit_code == 0 and stopped.complaints() == []


@pytest.mark.nightly
def test_a_rank_that_stands_still_costs_its_worker(running: Cluster) -> None:
    """The stop is noticed within `step_stall_s`, although the process lives."""
    gateway, ranked = running.gateway("gateway"), running.worker("ranked", "mixed", *RANKED, "--step-stall-s", "5")
    running.wait_serving()
    follower = follower_of(ranked)
    with Post(gateway.url, completion(20, 960, 2000, stream=True)) as post:
        post.wait_events(5)
        os.kill(follower, signal.SIGSTOP)
        assert ranked.wait() == 1
    until(lambda: not is_running(follower), "the end of the second rank")
