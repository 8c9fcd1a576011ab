"""Check the model's files and the space for them, without fetching, converting or loading anything."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from tandem.core.config import ModelConfig
from tandem.core.errors import TandemError
from tandem.doctor.finding import Finding, fail, format_bytes, ok, skip, warn

NEEDED_BYTES = 4 << 30
"""Space that must be free in the cache before a model is fetched. The smallest served model takes 1.2 GB including its
converted form; most are larger, but their size is not known in advance."""
_CONFIG, _TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Cache:
    """Directory for fetched models; `problem`: why it cannot be written, else empty."""

    path: str
    num_free_bytes: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """State of the model on this machine.

    `directory`: empty if the model is not on this machine yet. `missing`: files that the directory lacks. `problem`:
    why a worker could not find or load the model, else empty. `num_bytes`: size of the weights.
    """

    model: str
    cache: Cache
    directory: str = ""
    missing: tuple[str, ...] = ()
    problem: str = ""
    num_bytes: int = 0


def read_model(model: ModelConfig) -> ModelFacts | None:
    """Look for the model's files; returns None if the worker's packages are not installed."""
    try:
        catalog = import_module("tandem.runtime.model_store")
    except ModuleNotFoundError:
        return None
    root: Path = catalog.cache_root(model.cache_dir)
    cache = Cache(str(root), _num_free(root), _unwritable(root))
    try:
        directory: Path | None = catalog.find_local_model(model.id, root)
    except TandemError as error:
        return ModelFacts(model.id, cache, problem=error.message)
    if directory is None:
        return ModelFacts(model.id, cache)
    return _files(model.id, directory, cache, import_module("tandem.runtime.model_config").read_model_config)


def judge_model(facts: ModelFacts | None) -> tuple[Finding, ...]:
    if facts is None:
        return (skip("model", "torch is not installed: no worker runs here"),)
    return (_model(facts), _cache(facts.cache, is_needed=not facts.directory))


def _model(facts: ModelFacts) -> Finding:
    if facts.missing or facts.problem:
        where = facts.directory or facts.model
        summary = f"{where}: {facts.problem or 'it lacks ' + ', '.join(facts.missing)}"
        fix = "a --model that is an alias, a directory with config, tokenizer and safetensors, a .gguf file or a hub id"
        if facts.missing:
            fix = f"remove {where} and let a worker fetch it again, or complete it"
        return fail("model", summary, fix)
    if not facts.directory:
        fix = "the first worker fetches it; if it cannot, fetch it elsewhere and mount it (`cache` of the chart)"
        return warn("model", f"{facts.model} is not on this machine yet", fix)
    return ok("model", f"{facts.model} in {facts.directory}, {format_bytes(facts.num_bytes)} of weights")


def _cache(cache: Cache, *, is_needed: bool) -> Finding:
    summary = f"{format_bytes(cache.num_free_bytes)} are free in {cache.path}"
    if cache.problem and is_needed:
        fix = "--model-cache-dir DIRECTORY that can be written, in a pod the volume of `cache`"
        return fail("cache", f"{cache.path}: {cache.problem}", fix)
    if cache.num_free_bytes < NEEDED_BYTES and is_needed:
        fix = "--model-cache-dir on a larger disk; in a pod a larger `cache.size`"
        return warn("cache", f"{summary}, and the model is not fetched yet", fix)
    return ok("cache", summary + ("; nothing needs to be written there" if cache.problem else ""))


def _files(model: str, directory: Path, cache: Cache, check: Callable[[Path], object]) -> ModelFacts:
    problem, missing = "", [name for name in (_CONFIG, _TOKENIZER) if not (directory / name).is_file()]
    weights = [] if _is_random(directory) else _weights(directory)
    missing += [name for name in weights if not (directory / name).is_file()]
    if not missing:
        try:
            check(directory)
        except TandemError as error:
            problem = error.message
    num_bytes = sum((directory / name).stat().st_size for name in weights if (directory / name).is_file())
    return ModelFacts(model, cache, str(directory), tuple(missing), problem, num_bytes)


def _weights(directory: Path) -> list[str]:
    """Return the names of all files with weights, according to the index if there is one."""
    index = directory / "model.safetensors.index.json"
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except FileNotFoundError:
        return ["model.safetensors"]
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        return [index.name + " (readable)"]


def _is_random(directory: Path) -> bool:
    return not any(directory.glob("*.safetensors*")) and directory.name.startswith("random-")


def _num_free(cache: Path) -> int:
    return shutil.disk_usage(_nearest(cache)).free


def _unwritable(cache: Path) -> str:
    """Return why a directory cannot be written or made; empty if it can."""
    nearest = _nearest(cache)
    if os.access(nearest, os.W_OK | os.X_OK):
        return ""
    return f"{nearest} cannot be written by user {os.getuid()}"


def _nearest(path: Path) -> Path:
    """Return the path or its nearest parent that exists."""
    return next(directory for directory in (path, *path.parents) if directory.is_dir())
