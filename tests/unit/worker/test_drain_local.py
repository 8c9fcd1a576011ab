"""Test `tandem drain --local` with workers that serve, that hold work, that have ended, and that reject its proof."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tandem.cli import main
from tandem.core.config import ClusterConfig, WorkerConfig
from tandem.core.events import Finished
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.wire.gen import worker_pb2 as pb
from tandem.worker.run_file import RunFile
from tests.e2e.client import new_request
from tests.ports import free_port
from tests.unit.worker.conftest import Node, Nodes, pace
from tests.unit.worker.fake_model import MODEL


async def drain(directory: Path, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["drain", "--local", "--run-dir", str(directory), *arguments])


async def is_draining(node: Node) -> bool:
    return (await node.client.stub.Describe(pb.DescribeRequest())).load.draining


async def test_all_local_workers_drain(nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = WorkerConfig(run_dir=str(tmp_path))
    first, second, elsewhere = [await nodes.start(worker=one) for one in (here, here, WorkerConfig())]
    assert await drain(tmp_path) == 0
    assert [await is_draining(node) for node in (first, second, elsewhere)] == [True, True, False]
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"w{number} accepts no new jobs; no jobs and leases are left" for number in (0, 1)]


@pytest.mark.slow
async def test_work_left_at_the_timeout_is_reported(
    nodes: Nodes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy, _ = [await nodes.start(worker=WorkerConfig(run_dir=str(tmp_path))) for _ in range(2)]
    pace(busy.executor)
    key = await busy.client.generate(new_request(MODEL, range(8), 600))
    assert await drain(tmp_path, "--timeout", "0.2") == 1
    busy.executor.before_step = lambda plan: None
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines[0] == "w0 accepts no new jobs; 1 jobs and leases are left after 0.2 s"
    assert lines[1].startswith("w1 accepts")
    assert isinstance(await busy.client.end_of(key), Finished)


async def test_an_ended_worker_has_no_work_left(
    nodes: Nodes, tmp_path: Path, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The worker was killed, or killed and followed by another incarnation at the same port."""
    node = await nodes.start(cluster=ClusterConfig(secret_file=str(secret)))
    run_dir, me = tmp_path / "run", node.worker.me
    for name, address in (("killed", f"127.0.0.1:{free_port()}"), ("before", me.address)):
        RunFile(run_dir, WorkerRef(WorkerId(name), Incarnation(me.incarnation - 1), address)).write()
    assert await drain(run_dir, "--secret-file", str(secret)) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    assert lines == [f"{name} does not run any more" for name in ("before", "killed")]
    assert not await is_draining(node)


async def test_a_worker_that_rejects_the_proof_is_not_drained(
    nodes: Nodes, tmp_path: Path, secret: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    here = WorkerConfig(run_dir=str(run_dir))
    node = await nodes.start(worker=here, cluster=ClusterConfig(secret_file=str(secret)))
    assert await drain(run_dir) == 1
    assert capsys.readouterr().out.startswith("w0 is not drained: unauthenticated")
    assert not await is_draining(node)


def test_without_workers_no_work_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", "--local", "--run-dir", str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local"], "worker.run_dir is empty"),
        (["--local", "w0", "--run-dir", "/tmp"], "name either a worker, or --local"),
        ([], "name either a worker, or --local"),
    ],
)
def test_an_invalid_argument_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drain", *arguments]) == 2
    assert message in capsys.readouterr().err
