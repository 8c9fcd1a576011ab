"""Test `.ci/set_up.py`: what it installs for whom, what its lines say of pip, and what it advises after a failure."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module, in a folder with the files that it reads and without an environment."""
    spec = importlib.util.spec_from_file_location("set_up", ROOT / ".ci" / "set_up.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / ".ci").mkdir()
    for name in ("pyproject.toml", "constraints.txt", ".ci/set_up.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TANDEM_TORCH_INDEX", raising=False)
    return module


class Lines:
    def step(self, *_: object) -> None:
        """Show nothing."""


def commands(set_up: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Set up `name` and return the stages whose commands were started, with the extras that pip was to install."""
    started: list[str] = []

    class Job:
        def __init__(self, stage: str, command: Sequence[str]) -> None:
            arguments = list(map(str, command))
            extras = next((each for each in arguments if each.startswith(".[")), "")
            started.append(f"{stage}{extras[1:]}")

        def is_running(self) -> bool:
            return False

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(set_up, "Job", Job)
    monkeypatch.setattr(set_up, "works", lambda: (set_up.VENV / ".tandem-serve").exists())
    monkeypatch.setattr(set_up.shutil, "which", lambda _: None)
    monkeypatch.setattr(
        set_up.subprocess, "run", lambda *_, **__: set_up.subprocess.CompletedProcess([], 0, "numpy", "")
    )
    if not set_up.is_set_up(name):
        set_up.SetUp(name, Lines()).run()
    return started


def test_serving_installs_no_test_tool_and_testing_adds_them(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commands(set_up, "serve", monkeypatch) == ["kernels", "python", "packages[gateway,worker]", "import"]
    assert commands(set_up, "serve", monkeypatch) == []
    assert commands(set_up, "all", monkeypatch) == ["kernels", "tools"]
    assert commands(set_up, "all", monkeypatch) == commands(set_up, "serve", monkeypatch) == []


def test_everything_includes_what_serving_needs(set_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert commands(set_up, "all", monkeypatch)[2:] == ["packages[gateway,worker]", "import", "tools"]
    assert commands(set_up, "serve", monkeypatch) == []
    assert "pytest>=9.2" in set_up.requirements(set_up.FURTHER_EXTRAS)


@pytest.mark.parametrize(
    ("name", "old", "new", "is_kept"),
    [
        ("pyproject.toml", "line-length = 120", "line-length = 119", True),
        ("pyproject.toml", '"redis>=8,<9"', '"redis>=8,<8.2"', False),
        ("constraints.txt", "redis==", "redis===", False),
    ],
)
def test_the_environment_is_made_anew_when_requirements_change(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str, is_kept: bool
) -> None:
    commands(set_up, "all", monkeypatch)
    text = Path(name).read_text()
    assert old in text
    Path(name).write_text(text.replace(old, new))
    assert set_up.is_set_up("serve") is set_up.is_set_up("all") is is_kept


PIP = """
WARNING: Location 'file:///x/' is ignored: it is neither a file nor a directory.
  Installing build dependencies: started
Processing /wheels/torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl
Collecting huggingface-hub>=2.4 (from tandem==0.1.0)
  Downloading huggingface_hub-2.4.0-py3-none-any.whl (857 kB)
Collecting ray[serve]==2.60.* (from tandem==0.1.0)
  Downloading ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl (79.3 MB)
"""


def test_the_lines_describe_pip_by_its_output(set_up: ModuleType) -> None:
    assert set_up.installing("", 1) == ""
    assert set_up.installing("\n".join(PIP.splitlines()[:3]), 1) == "Installing build dependencies: started"
    assert set_up.installing("\n".join(PIP.splitlines()[:6]), 1) == "found 2 packages; now huggingface-hub"
    assert set_up.installing(PIP, 1) == "found 3 packages, 80 MB downloaded; now ray"
    chosen = PIP + "Installing collected packages: torch, huggingface-hub, ray\n"
    assert set_up.installing(chosen, 2) == "installing 3 packages; 2 are there"


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        (
            "Temporary failure in name resolution')\nERROR: No matching distribution found for torch",
            "Check the network",
        ),
        ("ERROR: No matching distribution found for nixl-cu12", "tested versions for Python 3"),
        ("The virtual environment was not created successfully because ensurepip is not available", "python3-venv"),
        ("[Errno 13] Permission denied: '.venv/lib'", "Check who owns"),
    ],
)
def test_known_failures_have_advice(set_up: ModuleType, output: str, advice: str) -> None:
    assert advice in set_up.hint(output)


def test_a_failed_command_is_shown_with_the_end_of_its_output_and_the_log(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(setting_up: object) -> None:
        set_up.VENV.mkdir()
        set_up.LOG.write_text("")
        setting_up._finish(setting_up._start("python", ["sh", "-c", "echo ensurepip is not available; exit 3"]))  # type: ignore[attr-defined]

    monkeypatch.setattr(set_up.SetUp, "run", run)
    assert set_up.main("serve") == 1
    shown = capsys.readouterr().err
    assert "set-up failed: python: the command ended with code 3\n" in shown
    assert "  ensurepip is not available\n" in shown and "apt-get install python3-venv" in shown
    assert shown.endswith(f"{set_up.LOG}\n")
