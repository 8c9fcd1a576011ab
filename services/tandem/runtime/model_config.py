"""Read config.json of a model directory into a `DecoderSpec`; raise an error for a model with unsupported features."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.fields import Fields
from tandem.runtime.architectures.quantization_config import read_stored_formats
from tandem.runtime.architectures.refusal import Json, unsupported
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.architectures.table import FAMILIES, Family
from tandem.runtime.json_file import read_json


def read_model_config(directory: Path) -> DecoderSpec:
    """Read and parse `config.json` of a model directory, and `hf_quant_config.json`, which NVIDIA's Model Optimizer
    writes, if there is one.

    Raises TandemError(MODEL_NOT_FOUND) when config.json is missing, and TandemError(UNSUPPORTED) when a file is not a
    JSON object or a field is unsupported; the message names the file and the field."""
    path = directory / "config.json"
    if not path.is_file():
        what = f"{directory} is not a model directory: it has no config.json"
        raise TandemError(ErrorKind.MODEL_NOT_FOUND, what, param="model")
    raw = read_json(path)
    source = _add_quantization(raw, directory / "hf_quant_config.json") or path
    try:
        return parse_model_config(raw)
    except TandemError as error:
        raise TandemError(error.kind, f"{source}: {error.message}", param=error.param) from None


def _add_quantization(raw: dict[str, Any], path: Path) -> str:
    """Add to the content of a config.json what the file `path` says of the weights, unless it says so itself. Return
    the names of both files for error messages; empty where nothing was added."""
    weights = {} if raw.get("quantization_config") else read_json(path).get("quantization")
    if not weights:
        return ""
    if not isinstance(weights, dict):
        raise unsupported(f"{path}: quantization is not an object")
    raw["quantization_config"] = {"quant_method": "modelopt", **weights}
    return f"{path.with_name('config.json')} and {path.name}"


def for_longest(spec: DecoderSpec, max_model_len: int) -> DecoderSpec:
    """Return `spec` adapted to the longest request.

    `max_model_len`: length of the longest request in tokens; 0: the longest context of the model. Only a model with
    LongRoPE is changed. It has one set of frequencies for contexts of up to the original length, and another for longer
    ones, but a worker uses one set for all requests, because keys in its KV are rotated once. If requests may exceed
    the original length, the set for longer contexts is used, else the other one."""
    if spec.rope.kind != "longrope":
        return spec
    original = spec.rope.original_length
    assert original
    if (max_model_len or spec.max_length) > original:
        return replace(spec, rope=replace(spec.rope, is_long=True))
    return replace(spec, max_length=original)


def parse_model_config(raw: Json) -> DecoderSpec:
    """Build the specification of the decoder from `raw`, the parsed content of a config.json.

    Raises TandemError(UNSUPPORTED) for a feature that is not implemented or a missing size, with a message that names
    the field, and for a value of a wrong type, with the message of Python's exception."""
    try:
        family = _family(raw)
        fields = Fields(raw)
        stored = read_stored_formats(fields.get("quantization_config"))
        spec = replace(family.read(fields), stored=stored)
        fields.finish()
        return spec
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise unsupported(f"config.json has a value of a wrong type: {error}") from None


def _family(raw: Json) -> Family:
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise unsupported(f"model_type={model_type!r} (known: {', '.join(FAMILIES)})")
    family = FAMILIES[model_type]
    architectures = raw.get("architectures") or [family.architecture]
    if architectures != [family.architecture]:
        raise unsupported(f"architectures={architectures!r}")
    return family
