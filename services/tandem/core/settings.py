"""Merge layers of settings into one checked `Config`, and derive the flag and environment names of each setting.

Files and the environment are passed in as mappings.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tandem.core.config import Bytes, Config, value_of
from tandem.core.config_rules import violations
from tandem.core.errors import ErrorKind, TandemError

DEFAULT_LAYER = "default"
ENV_PREFIX = "TANDEM_"
ENV_SEPARATOR = "__"

# Flags that are shorter or better known than those that `flags_of` derives.
_FLAG_NAMES = {
    "model.id": "--model",
    "model.served_name": "--served-model-name",
    "model.cache_dir": "--model-cache-dir",
    "speculative.method": "--speculative-method",
    "speculative.num_tokens": "--speculative-num-tokens",
    "speculative.max_batch_tokens": "--speculative-max-batch-tokens",
    "handoff.transport": "--kv-transport",
    "handoff.digests": "--kv-digests",
    "gateway.host": "--host",
    "gateway.port": "--port",
    "redis.url": "--redis-url",
    "worker.id": "--worker-id",
    "worker.metrics_port": "--metrics-port",
    "handoff.lease_s": "--lease-s",
    "planner.model": "--planner-model",
}

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the tree of settings. `type` is int, float, bool, str, Bytes or a Literal of strings."""

    section: str
    name: str
    type: Any
    default: Any
    doc: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        return f"{ENV_PREFIX}{self.section}{ENV_SEPARATOR}{self.name}".upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values that a Literal allows; empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked tree. `origins` maps every `section.name` to the name of the layer that set its value."""

    config: Config
    origins: Mapping[str, str]


@cache
def settings() -> tuple[Setting, ...]:
    """Return every leaf in the order of the tree; cached, because a command line needs them once per program."""
    sections = get_type_hints(Config)
    changes: list[Setting] = []
    for section in fields(Config):
        hints = get_type_hints(sections[section.name])
        for leaf in fields(sections[section.name]):
            assert leaf.default is not MISSING
            doc = leaf.metadata.get("doc", "")
            changes.append(Setting(section.name, leaf.name, hints[leaf.name], leaf.default, doc))
    return tuple(changes)


def flags_of() -> dict[str, tuple[str, ...]]:
    """Return the command line flags of each `section.name`, shortest first; every flag names one setting.

    A setting has the flag `--section-name`, and `--name` where no other section has that name or a well-known short
    flag (`--model`, `--port`). A switch also has a `--no-` form of each.
    """
    leaves = settings()
    names = [leaf.name for leaf in leaves]
    table: dict[str, tuple[str, ...]] = {}
    for leaf in leaves:
        short = _FLAG_NAMES.get(leaf.key) or (f"--{leaf.name}" if names.count(leaf.name) == 1 else None)
        flags = [short] if short else []
        flags.append(f"--{leaf.section}-{leaf.name}")
        table[leaf.key] = tuple(dict.fromkeys(flag.replace("_", "-") for flag in flags))
    return table


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the layer in `TANDEM_SECTION__NAME` variables.

    Other variables with the prefix are ignored, but one that spells a setting with a single underscore is refused.
    """
    misspelt = {leaf.env.replace(ENV_SEPARATOR, "_"): leaf.env for leaf in settings()}
    layer: dict[str, str] = {}
    for name, value in environ.items():
        if name in misspelt:
            raise _refuse(name, f"environment variable {name} is not read: write {misspelt[name]}")
        if name.startswith(ENV_PREFIX) and ENV_SEPARATOR in name:
            layer[name.removeprefix(ENV_PREFIX).lower().replace(ENV_SEPARATOR, ".", 1)] = value
    return layer


def build(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
    """Return the checked tree of `layers`; see `resolve`."""
    return resolve(layers).config


def resolve(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Resolved:
    """Merge named layers over the defaults, later layers winning, and check the result.

    A layer is nested (`{"engine": {"block_size": 16}}`) or flat (`{"engine.block_size": "16"}`); values may be text.
    Raises TandemError(INVALID_REQUEST) with key, layer, value and what is allowed.
    """
    leaves = {leaf.key: leaf for leaf in settings()}
    origins = dict.fromkeys(leaves, DEFAULT_LAYER)
    values: dict[str, dict[str, Any]] = {}
    for layer, mapping in layers:
        for key, raw in _flatten(layer, mapping).items():
            if key not in leaves:
                raise _unknown(layer, key, list(leaves))
            leaf = leaves[key]
            values.setdefault(leaf.section, {})[leaf.name] = _coerce(leaf, layer, raw)
            origins[key] = layer
    base = Config()
    changed = {section: replace(getattr(base, section), **changes) for section, changes in values.items()}
    config = replace(base, **changed)
    _check(config, origins)
    return Resolved(config, origins)


def _flatten(layer: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    sections = [section.name for section in fields(Config)]
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise _refuse(str(key), f"{key!r} (from {layer}) is not the name of a section")
        if "." in key:
            flat[key] = value
        elif key not in sections:
            raise _unknown(layer, key, sections)
        elif value is not None:  # a section with nothing below it
            flat.update(_section(layer, key, value))
    return flat


def _section(layer: str, section: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _refuse(section, f"{section} = {value!r} (from {layer}) must be a mapping of settings")
    return {f"{section}.{name}": leaf for name, leaf in value.items()}


def _coerce(leaf: Setting, layer: str, raw: Any) -> Any:
    read, allowed = _reader(leaf)
    try:
        return read(raw)
    except (ValueError, TypeError, OverflowError):
        raise _refuse(leaf.key, f"{leaf.key} = {raw!r} (from {layer}) must be {allowed}") from None


def _reader(leaf: Setting) -> tuple[Callable[[Any], Any], str]:
    """Return the function that reads a value of this setting, and a description of the allowed values."""
    if leaf.choices:
        return (lambda raw: _read_choice(raw, leaf.choices)), f"one of {', '.join(leaf.choices)}"
    readers: dict[Any, tuple[Callable[[Any], Any], str]] = {
        int: (_read_int, "a whole number"),
        float: (_read_float, "a finite number"),
        bool: (_read_bool, "true or false"),
        str: (_read_str, "text"),
        Bytes: (_read_bytes, "a size such as 512MiB, 2GiB or a number of bytes"),
    }
    return readers[leaf.type]


def _read_int(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise TypeError
    return int(raw)


def _read_float(raw: Any) -> float:
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise TypeError
    number = float(raw)
    if not math.isfinite(number):
        raise ValueError
    return number


def _read_bool(raw: Any) -> bool:
    word = str(raw).strip().lower()
    if isinstance(raw, bool | str) and word in _TRUE + _FALSE:
        return word in _TRUE
    raise ValueError


def _read_str(raw: Any) -> str:
    if not isinstance(raw, str):
        raise TypeError
    return raw


def _read_bytes(raw: Any) -> Bytes:
    if isinstance(raw, bool) or not isinstance(raw, int | str):
        raise TypeError
    return Bytes.parse(raw)


def _read_choice(raw: Any, choices: tuple[str, ...]) -> str:
    # YAML 1.1 reads a bare `off` as False.
    word = {False: "off", True: "on"}[raw] if isinstance(raw, bool) else raw
    if word not in choices:
        raise ValueError
    return str(word)


def _check(config: Config, origins: Mapping[str, str]) -> None:
    broken = violations(config)
    if not broken:
        return
    messages = [f"{v.key} = {value_of(config, v.key)} (from {origins[v.key]}) {v.rule}" for v in broken]
    raise _refuse(broken[0].key, "; ".join(messages))


def _unknown(layer: str, key: str, known: Sequence[str]) -> TandemError:
    names = {name: name for name in known}
    # A leaf in the wrong section, or without a section, matches the leaf of the same name.
    names.update({name.rpartition(".")[2]: name for name in known})
    closest = difflib.get_close_matches(key, known, n=1) or [
        names[n] for n in difflib.get_close_matches(key.rpartition(".")[2], list(names), n=1)
    ]
    hint = f"; did you mean {closest[0]}?" if closest else ""
    return _refuse(key, f"unknown setting {key} (from {layer}){hint}")


def _refuse(key: str, message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message, param=key)
