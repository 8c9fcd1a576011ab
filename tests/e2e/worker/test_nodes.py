"""Test a worker whose ranks are started by two programs, as on two machines, that do not fit or not find each other.
tests/hosts/test_nodes.py has such a worker on two hosts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Program
from tests.e2e.gateway.processes import until
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)


class Pair:
    def __init__(self, directory: Path, model: Path) -> None:
        self._directory = directory
        self._port = str(free_port())
        self._model = model
        self._secret = directory / "secret"
        self._secret.write_text(secrets.token_hex(32))
        self.programs: list[Program] = []

    def start(self, number: int, *flags: str) -> Program:
        nodes = ("--tensor-parallel", "2", "--nnodes", "2", "--node-rank", str(number), "--num-threads", "1")
        at = ("--master-addr", "127.0.0.1", "--master-port", self._port, "--secret-file", str(self._secret))
        small = ("--model", str(self._model), "--kv-cache-memory", "1MiB", "--transfer-backend", "tcp")
        program = Program(self._directory, f"node-{number}", "worker", *small, *nodes, *at, *flags)
        self.programs.append(program)
        return program

    def another_secret(self) -> Path:
        other = self._directory / "other"
        other.write_text(secrets.token_hex(32))
        return other


@pytest.fixture
def pair(tmp_path: Path, tiny_directory: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path, tiny_directory)
    yield pair
    for program in pair.programs:
        program.stop()


def test_two_programs_are_one_worker_and_end_together(pair: Pair) -> None:
    second, first = pair.start(1), pair.start(0)
    first.wait_ready()
    assert first.stop() == 0
    assert second.wait() == 1 and "Traceback" not in first.log + second.log


@pytest.mark.nightly
def test_the_second_program_stops_by_a_signal_and_ends_the_first(pair: Pair) -> None:
    first, second = pair.start(0), pair.start(1)
    first.wait_ready()
    assert second.stop() == 0
    assert first.wait() == 1 and "rank 1 is gone" in first.log


@pytest.mark.nightly
def test_the_ranks_of_a_killed_program_end_too(pair: Pair) -> None:
    first, second = pair.start(0), pair.start(1)
    first.wait_ready()
    second.kill()
    assert first.wait() == 1 and "rank 1 is gone" in first.log


@pytest.mark.nightly
def test_other_settings_are_named_on_both_sides(pair: Pair) -> None:
    first, second = pair.start(0), pair.start(1, "--dtype", "float64")
    assert (first.wait(), second.wait()) == (1, 1)
    for log in (first.log, second.log):
        assert "model.dtype=float64 instead of model.dtype=float32" in log and "Traceback" not in log


@pytest.mark.nightly
def test_another_secret_is_named(pair: Pair) -> None:
    first = pair.start(0)
    second = pair.start(1, "--secret-file", str(pair.another_secret()))
    assert second.wait() == 1
    assert "compare cluster.secret_file" in second.log and "Traceback" not in second.log
    assert first.exit_code is None, "it waits for the right one"
    until(lambda: "does not prove that it knows the cluster's secret" in first.log, "the first program's view")


@pytest.mark.nightly
def test_a_program_that_waits_for_the_first_stops_by_a_signal(pair: Pair) -> None:
    second = pair.start(1)
    until(lambda: "connect to the first rank at" in second.log, "its attempts")
    assert second.stop() == 0
