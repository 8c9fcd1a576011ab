"""Test a worker whose two ranks are on two hosts: its tokens, hand-offs with a worker of one rank, and the loss of a
rank and of each host."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway.http import Post, begin_streams, completion
from tests.e2e.gateway.processes import Cluster, Gateway, Worker, until
from tests.e2e.gateway.tiny_model import make_model
from tests.hosts.cluster import complete, empty_hosts, reasons_of, tandem, text_of
from tests.hosts.conftest import SETTINGS
from tests.hosts.network import Network, NoNamespaces
from tests.pids import is_running

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

PORT = "29501"
NUM_STREAMS = 4
NUM_TOKENS = 400
LENGTHS = {1: 300, 2: 17, 3: 700}
"""Prompt lengths by salt."""
STREAMS = range(100, 100 + NUM_STREAMS)


@dataclass
class Nodes:
    """A cluster with the worker `one`, and the worker `wide` on the hosts x and y. `run_dir`: has a directory of run
    files for each of them. `first`, `second`: the programs of `wide`. `expected`: answers of `one` alone, by salt."""

    network: dict[str, Network]
    programs: Cluster
    gateway: Gateway
    one: Worker
    flags: tuple[str, ...]
    run_dir: Path
    expected: dict[int, str]
    first: Worker | None = None
    second: Worker | None = None

    def start_wide(self) -> None:
        """Start the program of each host, the second host's first, which has to wait for the other."""
        self.second = self._start("y", 1)
        self.first = self._start("x", 0)
        self.first.wait_ready()
        until(lambda: "wide" in self.listed(), "its registration")
        self.give_roles(wide="prefill", one="decode")

    def end_of_wide(self) -> tuple[int, int]:
        """Return the exit codes of its programs, once both have ended."""
        assert self.first is not None and self.second is not None
        return self.first.wait(), self.second.wait()

    def is_down(self) -> bool:
        return self.first is None or self.first.exit_code is not None

    def give_roles(self, *, wide: str, one: str) -> None:
        """Set the roles of both workers, and wait until a request is handed over accordingly."""
        expected = {wide: "wide", one: "one"}

        def is_split() -> bool:
            for role, worker in expected.items():
                tandem(self.network["gate"], "role", worker, role, *self.flags)
            reply = self.reply(0, 50)
            reasons = reasons_of(reply)
            return reply["path"] == "remote" and {role: reasons.get(role) for role in expected} == expected

        until(is_split, "hand-offs")

    def listed(self) -> str:
        return tandem(self.network["gate"], "role", *self.flags).stdout

    def reply(self, salt: int, length: int, num_tokens: int = 24) -> dict[str, Any]:
        return complete(self.gateway, completion(length, salt, num_tokens))

    def rank_of_second(self) -> int:
        """Return the process of the second rank, a child of the second host's program."""
        assert self.second is not None
        for entry in Path("/proc").iterdir():
            try:
                if b"tandem.worker.rank_process" in (entry / "cmdline").read_bytes():
                    parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                    if int(parent) == self.second.pid:
                        return int(entry.name)
            except (OSError, IndexError, ValueError):
                continue
        raise AssertionError(self.second.log)

    def _start(self, host: str, number: int) -> Worker:
        where = self.network[host]
        nodes = ("--tensor-parallel", "2", "--nnodes", "2", "--node-rank", str(number))
        at = ("--master-addr", self.network["x"].address, "--master-port", PORT, "--worker-host", where.address)
        name = "wide" if number == 0 else f"wide-{number}"
        run_dir = ("--run-dir", str(self.run_dir / host))
        return self.programs.worker(name, "prefill", *nodes, *at, *run_dir, *self.flags, within=where.within)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    directory = tmp_path_factory.mktemp("nodes")
    model = make_model(directory / "tiny")
    with ExitStack() as stack:
        try:
            hosts = empty_hosts(directory, model, ("gate", "one", "x", "y"), *SETTINGS)
            network, programs, flags = stack.enter_context(hosts)
        except NoNamespaces as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        gate, alone = network["gate"], network["one"]
        gateway = programs.gateway("gateway", "--host", gate.address, *flags, within=gate.within)
        one = programs.worker("one", "mixed", "--worker-host", alone.address, *flags, within=alone.within)
        programs.wait_serving()
        made = Nodes(network, programs, gateway, one, flags, directory / "run", {})
        for salt, length in LENGTHS.items():
            made.expected[salt] = text_of(made.reply(salt, length))
        for salt in STREAMS:
            made.expected[salt] = text_of(made.reply(salt, 300, NUM_TOKENS))
        made.start_wide()
        yield made


@pytest.fixture
def nodes(running: Nodes) -> Nodes:
    for host in ("x", "y"):
        running.network[host].plug_in()
    if running.is_down():
        running.start_wide()
    return running


@pytest.mark.parametrize(("wide", "one"), [("prefill", "decode"), ("decode", "prefill")])
def test_kv_moves_between_two_hosts_ranks_and_one_rank(nodes: Nodes, wide: str, one: str) -> None:
    nodes.give_roles(wide=wide, one=one)
    for salt, length in LENGTHS.items():
        reply = nodes.reply(salt, length)
        assert text_of(reply) == nodes.expected[salt] and reply["path"] == "remote"
        reasons = reasons_of(reply)
        assert (reasons[wide], reasons[one]) == ("wide", "one")


def test_a_drain_of_the_second_host_drains_the_worker(nodes: Nodes) -> None:
    nodes.give_roles(wide="prefill", one="decode")
    drained = tandem(nodes.network["y"], "drain", "--local", "--run-dir", str(nodes.run_dir / "y"), *nodes.flags)
    assert drained.returncode == 0 and "wide accepts no new jobs" in drained.stdout, drained
    assert nodes.reply(1, 300)["path"].startswith("fallback")
    undone = tandem(nodes.network["gate"], "drain", "--undo", "wide", *nodes.flags)
    assert undone.returncode == 0, undone
    until(lambda: nodes.reply(2, 300)["path"] == "remote", "hand-offs again")


def lose(nodes: Nodes, how: Callable[[], None]) -> None:
    """Lose `wide` in the middle of streams, and check that all end with the text that they have without."""
    with ExitStack() as stack:
        posts = begin_streams(stack, nodes.gateway.url, [completion(300, salt, NUM_TOKENS) for salt in STREAMS], 5)
        how()
        later = [text_of(nodes.reply(salt, length)) for salt, length in LENGTHS.items()]
        with ThreadPoolExecutor(NUM_STREAMS) as readers:
            answers = list(readers.map(Post.finish, posts))
    assert [answer.error() for answer in answers] == [None] * NUM_STREAMS
    assert [answer.text() for answer in answers] == [nodes.expected[salt] for salt in STREAMS]
    assert later == [nodes.expected[salt] for salt in LENGTHS]
    assert nodes.end_of_wide() == (1, 1)


def test_a_rank_is_killed(nodes: Nodes) -> None:
    nodes.give_roles(wide="decode", one="prefill")
    lose(nodes, lambda: os.kill(nodes.rank_of_second(), signal.SIGKILL))
    assert nodes.first is not None and "rank 1 is gone" in nodes.first.log and "Traceback" not in nodes.first.log
    until(lambda: "wide" not in nodes.listed(), "the end of its registration")
    nodes.start_wide()
    assert text_of(nodes.reply(1, LENGTHS[1])) == nodes.expected[1]


def test_the_first_rank_is_killed(nodes: Nodes) -> None:
    second = nodes.rank_of_second()
    assert nodes.first is not None and nodes.second is not None
    nodes.first.kill()
    assert nodes.second.wait() == 1 and not is_running(second)


@pytest.mark.parametrize("host", ["x", "y"])
def test_a_host_is_unplugged(nodes: Nodes, host: str) -> None:
    """No packet of its connections arrives any more, not even their end."""
    nodes.give_roles(wide="decode", one="prefill")
    lose(nodes, nodes.network[host].unplug)
