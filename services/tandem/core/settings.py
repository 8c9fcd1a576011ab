"""Merge layers of settings into one checked `Config`, and derive the flag and environment names of each setting.

Files and the environment are passed in as mappings.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from tandem.core import config as config_module
from tandem.core.config import MAX_FLOAT, Bytes, Config, value_of
from tandem.core.config_rules import violations
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.near_name import near_name

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
    "transfer.backend": "--transfer-backend",
    "handoff.digests": "--kv-digests",
    "gateway.host": "--host",
    "gateway.port": "--port",
    "gateway.tls_cert_file": "--ssl-certfile",  # this and the next two are vLLM's
    "gateway.tls_key_file": "--ssl-keyfile",
    "gateway.tls_client_ca_file": "--ssl-ca-certs",
    "cluster.tls_cert_file": "--tls-cert-file",
    "cluster.tls_key_file": "--tls-key-file",
    "redis.url": "--redis-url",
    "worker.metrics_port": "--metrics-port",
    "handoff.lease_s": "--lease-s",
    "planner.model": "--planner-model",
}

_SWITCHES = {"yes": True, "on": True, "no": False, "off": False}
"""Words for a switch beside those that msgspec reads: true, false, 1 and 0."""
_ALLOWED = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    Bytes: "a size such as 512MiB, 2GiB or a number of bytes",
}
_LIMITS = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}


@dataclass(frozen=True, slots=True)
class Setting:
    """Describe one setting of the `Config` tree: its section, its name and its default.

    `annotation`: its type with its range, in the form that msgspec checks; `doc`: its description in help texts.
    """

    section: str
    name: str
    annotation: Any
    default: Any
    doc: str

    @property
    def key(self) -> str:
        """Return the name of the setting in files: `section.name`."""
        return f"{self.section}.{self.name}"

    @property
    def env(self) -> str:
        """Return the name of the environment variable that sets it: `TANDEM_SECTION__NAME`."""
        return f"{ENV_PREFIX}{self.section}{ENV_SEPARATOR}{self.name}".upper()

    @property
    def type(self) -> Any:
        """Return the type without its range: int, float, bool, str, Bytes or a Literal of strings."""
        return get_args(self.annotation)[0] if get_origin(self.annotation) is Annotated else self.annotation

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the values that are allowed if the type is a Literal; empty for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def allowed(self) -> str:
        """Return a description of the allowed values that completes the sentence "the value must be ..."."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        limits = [
            f"{words} {limit:g}"
            for meta in getattr(self.annotation, "__metadata__", ())
            for name, words in _LIMITS.items()
            if (limit := getattr(meta, name)) is not None and limit != MAX_FLOAT
        ]
        return f"{_ALLOWED[self.type]} of {' and '.join(limits)}" if limits else _ALLOWED[self.type]


@dataclass(frozen=True, slots=True)
class Resolved:
    """Hold valid settings, and for every `section.name` in `origins` the name of the layer that set it."""

    config: Config
    origins: Mapping[str, str]


@cache
def settings() -> tuple[Setting, ...]:
    """Return all settings in the order of the `Config` tree; computed once per process."""
    docs = _descriptions()
    found: list[Setting] = []
    for name, section in get_type_hints(Config).items():
        annotations = get_type_hints(section, include_extras=True)
        for leaf in fields(section):
            doc = docs[section.__name__, leaf.name]
            found.append(Setting(name, leaf.name, annotations[leaf.name], leaf.default, doc))
    return tuple(found)


def section_docs() -> dict[str, str]:
    """Return the docstring of each section of the `Config` tree, on one line."""
    return {name: " ".join((section.__doc__ or "").split()) for name, section in get_type_hints(Config).items()}


def format_default(value: object) -> str:
    """Return a default value as help texts write it: `true`, `empty` for an empty text, `512`."""
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value == "" else str(value)


def _descriptions() -> dict[tuple[str, str], str]:
    """Return the string under each field of the settings' sections, on one line. The keys are pairs (name of the
    section's class, name of the field)."""
    found: dict[tuple[str, str], str] = {}
    for section in ast.parse(inspect.getsource(config_module)).body:
        if isinstance(section, ast.ClassDef):
            for leaf, below in pairwise(section.body):
                if isinstance(leaf, ast.AnnAssign) and isinstance(below, ast.Expr):
                    name = ast.unparse(leaf.target)
                    found[section.name, name] = " ".join(ast.literal_eval(below.value).split())
    return found


def flags_of() -> dict[str, tuple[str, ...]]:
    """Return the command line flags of each setting, by `section.name`, shortest first; every flag names one setting.

    A setting has the flag `--section-name`. It also has `--name`, where no other section has that name, or a well-known
    short flag (`--model`, `--port`). A switch also has a `--no-` form of each flag, which is not listed here.
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
    """Return the settings in the variables `TANDEM_SECTION__NAME` of `environ`, by `section.name`, as a layer for
    `resolve`.

    Other variables are ignored, but TandemError is raised for one that is a setting's name with a single underscore
    between section and name.
    """
    misspelt = {leaf.env.replace(ENV_SEPARATOR, "_"): leaf.env for leaf in settings()}
    layer: dict[str, str] = {}
    for name, value in environ.items():
        if name in misspelt:
            raise _refuse(
                name, f"environment variable {name} sets nothing: write {misspelt[name]}, with two underscores"
            )
        if name.startswith(ENV_PREFIX) and ENV_SEPARATOR in name:
            layer[name.removeprefix(ENV_PREFIX).lower().replace(ENV_SEPARATOR, ".", 1)] = value
    return layer


def build(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Config:
    """Return the `Config` that `resolve` builds from `layers`; raises as `resolve` does."""
    return resolve(layers).config


def resolve(layers: Sequence[tuple[str, Mapping[str, Any]]]) -> Resolved:
    """Merge layers of settings over the defaults, and check the result against ranges and rules. Of a setting that
    several layers have, the last layer wins.

    `layers`: pairs (name of the layer for messages, mapping of settings). A mapping is nested (`{"engine":
    {"block_size": 16}}`) or flat (`{"engine.block_size": "16"}`); values may be text. Raises TandemError
    (INVALID_REQUEST) that names the setting, its layer, its value and what is allowed.
    """
    leaves = {leaf.key: leaf for leaf in settings()}
    origins = dict.fromkeys(leaves, DEFAULT_LAYER)
    values: dict[str, dict[str, Any]] = {}
    refused: list[tuple[str, str]] = []
    for layer, mapping in layers:
        for key, raw in _flatten(layer, mapping).items():
            if key not in leaves:
                raise _unknown(layer, key, list(leaves))
            leaf = leaves[key]
            try:
                values.setdefault(leaf.section, {})[leaf.name] = _convert(leaf, raw)
            except msgspec.ValidationError:
                refused.append((key, f"{key} = {raw!r} (from {layer}) must be {leaf.allowed}"))
            origins[key] = layer
    base = Config()
    config = replace(base, **{section: replace(getattr(base, section), **found) for section, found in values.items()})
    if not refused:
        refused = [(k, f"{k} = {value_of(config, k)} (from {origins[k]}) {rule}") for k, rule in violations(config)]
    if refused:
        raise _refuse(refused[0][0], "; ".join(message for _, message in refused))
    return Resolved(config, origins)


def _flatten(layer: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer's values by `section.name`. Raises TandemError for a key or a section of the wrong form."""
    flat: dict[str, Any] = {}
    sections = [section.name for section in fields(Config)]
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise _refuse(str(key), f"{key!r} (from {layer}) is not the name of a section: {', '.join(sections)}")
        if "." in key:
            flat[key] = value
        elif key not in sections:
            raise _unknown(layer, key, sections)
        elif isinstance(value, Mapping):
            flat.update({f"{key}.{name}": leaf for name, leaf in value.items()})
        elif value is not None:  # None: a section with nothing below it
            raise _refuse(key, f"{key} = {value!r} (from {layer}) must be a mapping of setting names to values")
    return flat


def _convert(setting: Setting, raw: Any) -> Any:
    """Return the value of a setting from a file, a variable or a flag. Raises msgspec.ValidationError."""
    if isinstance(raw, bool) and setting.choices:
        raw = "on" if raw else "off"  # YAML 1.1 reads a bare `off` as False
    elif isinstance(raw, str) and setting.type in (int, float, bool):
        word = raw.strip().lower()
        raw = _SWITCHES.get(word, word)
    return msgspec.convert(raw, setting.annotation, strict=False, dec_hook=lambda _, text: Bytes.parse(text))


def _unknown(layer: str, key: str, known: Sequence[str]) -> TandemError:
    names = {name: name for name in known}
    # A leaf in the wrong section, or without a section, matches the leaf of the same name.
    names.update({name.rpartition(".")[2]: name for name in known})
    nearest = near_name(key, known) or names.get(near_name(key.rpartition(".")[2], names), "")
    hint = f"did you mean {nearest}?" if nearest else "`tandem config` lists all settings"
    return _refuse(key, f"unknown setting {key} (from {layer}); {hint}")


def _refuse(key: str, message: str) -> TandemError:
    return TandemError(ErrorKind.INVALID_REQUEST, message, param=key)
