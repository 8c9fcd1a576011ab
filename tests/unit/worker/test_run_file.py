"""Test the run files by which local workers are found: present while a worker runs, removed only by their owner, and
written atomically.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.core.config import Config, EngineConfig, WorkerConfig
from tandem.core.errors import TandemError
from tandem.core.ids import Incarnation, WorkerId, WorkerRef
from tandem.worker import rank_process
from tandem.worker.run_file import RunFile, read_run_files
from tests.unit.worker.conftest import Nodes


def worker(name: str, incarnation: int = 1) -> WorkerRef:
    return WorkerRef(WorkerId(name), Incarnation(incarnation), f"10.0.0.1:{incarnation}")


def test_run_files_list_the_running_workers(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "run"
    assert read_run_files(directory) == ()
    refs = [worker("b/../x"), worker("a", 2)]
    for ref in refs:
        RunFile(directory, ref).write()
    assert read_run_files(directory) == (refs[1], refs[0])
    assert directory.stat().st_mode & 0o777 == 0o700 and {path.parent for path in directory.rglob("*")} == {directory}


def test_an_incarnation_removes_only_its_own_file(tmp_path: Path) -> None:
    first, second = RunFile(tmp_path, worker("a", 1)), RunFile(tmp_path, worker("a", 2))
    first.write()
    second.write()
    first.remove()
    assert read_run_files(tmp_path) == (worker("a", 2),)
    second.remove()
    second.remove()
    assert list(tmp_path.iterdir()) == []


def test_ranks_on_one_machine_may_write_the_same_file(tmp_path: Path) -> None:
    files = [RunFile(tmp_path, worker("a")) for _ in range(2)]
    for file in files:
        file.write()
    assert read_run_files(tmp_path) == (worker("a"),)
    for file in files:
        file.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rank", "run_dir", "writes"), [(1, "run", False), (2, "run", True), (3, "run", False), (2, "", False)]
)
def test_the_first_rank_of_each_further_machine_writes_the_run_file(
    tmp_path: Path, rank: int, run_dir: str, writes: bool
) -> None:
    where = str(tmp_path / run_dir) if run_dir else ""
    config = Config(engine=EngineConfig(tensor_parallel=4, nnodes=2), worker=WorkerConfig(run_dir=where))
    file = rank_process._make_run_file(config, rank, worker("wide"))
    assert (file is not None) is writes
    if file is not None:
        file.write()
        assert read_run_files(tmp_path / run_dir) == (worker("wide"),)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "x"}', '{"id": 3, "incarnation": 1, "address": "x:1"}'])
def test_an_invalid_run_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.worker").write_text(text)
    RunFile(tmp_path, worker("a")).write()
    assert read_run_files(tmp_path) == (worker("a"),)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TandemError) as caught:
        RunFile(tmp_path / "file", worker("a")).write()
    assert caught.value.param == "worker.run_dir" and str(tmp_path) in caught.value.message


async def test_a_worker_has_a_run_file_while_it_runs(nodes: Nodes, tmp_path: Path) -> None:
    node = await nodes.start(worker=WorkerConfig(run_dir=str(tmp_path)))
    assert read_run_files(tmp_path) == (node.worker.me,)
    await node.worker.stop()
    assert read_run_files(tmp_path) == ()
