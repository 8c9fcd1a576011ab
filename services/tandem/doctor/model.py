"""Check the model's files and the space for them, without fetching, converting or loading anything."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from pathlib import Path

from tandem.core.config import ModelConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, format_bytes, ok, skip, warn

NEEDED_BYTES = 4 << 30
"""Space that must be free in the cache before a model is fetched. The smallest served model takes 1.2 GB including its
converted form; most are larger, but their size is not known in advance."""
_FIX = "set a --model that is an alias, a directory with config, tokenizer and safetensors, a .gguf file or a hub id"


def check_model(model: ModelConfig) -> tuple[Finding, ...]:
    """Return findings on whether the model's files are on this machine, and whether there is space to fetch them.

    The check is skipped if torch is not installed. Fetches and loads nothing."""
    try:
        catalog = import_module("tandem.runtime.model_store")
    except ModuleNotFoundError:
        return (skip("model", "torch is not installed: no worker runs here"),)
    root: Path = catalog.cache_root(model.cache_dir)
    try:
        directory: Path | None = catalog.find_local_model(model.id, root)
    except TandemError as error:
        return fail("model", f"{model.id}: {error.message}", _FIX), _cache(root, is_needed=True)
    if directory is None:
        fix = "let the first worker fetch it; if it cannot, fetch it elsewhere and mount it (`cache` of the chart)"
        absent = warn("model", f"{model.id} is not on this machine yet", fix)
        return absent, _cache(root, is_needed=True)
    return _files(model.id, directory), _cache(root, is_needed=False)


def _files(model: str, directory: Path) -> Finding:
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    incomplete = f"remove {directory} and let a worker fetch it again, or add the files"
    if missing:
        return fail("model", f"{directory}: it lacks {', '.join(missing)}, so no worker can load it", incomplete)
    try:
        is_random = import_module("tandem.runtime.random_weights").is_random(directory)
        files: list[Path] = [] if is_random else import_module("tandem.runtime.checkpoint").weight_files(directory)
    except TandemError as error:
        return fail("model", error.message, incomplete)
    try:
        import_module("tandem.runtime.model_config").read_model_config(directory)
    except TandemError as error:
        return fail("model", f"{directory}: {error.message}", _FIX)
    num_bytes = sum(file.stat().st_size for file in files)
    return ok("model", f"{model} in {directory}, {format_bytes(num_bytes)} of weights")


def _cache(root: Path, *, is_needed: bool) -> Finding:
    """Check the directory for fetched models, into which a worker must write if it `is_needed`."""
    num_free_bytes, problem = shutil.disk_usage(_nearest(root)).free, _unwritable(root)
    summary = f"{format_bytes(num_free_bytes)} are free in {root}"
    if problem and is_needed:
        fix = "set --model-cache-dir to a directory that can be written; in a pod mount the volume of `cache`"
        return fail("cache", f"{root}: {problem}", fix)
    if num_free_bytes < NEEDED_BYTES and is_needed:
        fix = "set --model-cache-dir to a directory of a larger disk; in a pod raise `cache.size`"
        return warn(
            "cache", f"{summary}, and the model is not fetched yet: that may need {format_bytes(NEEDED_BYTES)}", fix
        )
    return ok("cache", summary + ("; nothing needs to be written there" if problem else ""))


def _unwritable(cache: Path) -> str:
    """Return why a directory cannot be written or made; empty if it can."""
    nearest = _nearest(cache)
    if os.access(nearest, os.W_OK | os.X_OK):
        return ""
    return f"{nearest} cannot be written by user {os.getuid()}"


def _nearest(path: Path) -> Path:
    """Return the path or its nearest parent that exists."""
    return next(directory for directory in (path, *path.parents) if directory.is_dir())
