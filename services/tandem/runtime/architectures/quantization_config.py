"""Read in which formats a checkpoint stores its matrices; raise an error that names what is not
implemented.

The `quant_method` "gguf" is Tandem's own: directories that `runtime.gguf` writes have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.runtime.architectures.refusal import Json, unsupported
from tandem.runtime.architectures.stored_format import (
    GGUF_FORMATS,
    INT8,
    MODELOPT_NVFP4,
    MXFP4,
    NVFP4,
    StoredFormat,
    awq_format,
    float8_format,
    gptq_format,
    packed_int4_format,
)

Formats = Sequence[StoredFormat]

# Fields that are ignored: they say how the weights were made, ask that activations or KV be rounded, or list
# modules that are or are not stored in few bits, which the names of the tensors show.
_HARMLESS = frozenset(
    {
        "act_group_aware",
        "activation_scheme",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_percent",
        "dataset",
        "desc_act",
        "exclude_modules",
        "exllama_config",
        "global_compression_ratio",
        "ignore",
        "ignored_layers",
        "kv_cache_quant_algo",
        "kv_cache_scheme",
        "lm_head",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "modules_to_convert",
        "modules_to_not_convert",
        "pad_token_id",
        "producer",
        "quant_method",
        "quantization_status",
        "static_groups",
        "sym",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
        "version",
    }
)


def read_stored_formats(config: Json | None) -> tuple[StoredFormat, ...]:
    """Return the formats of the matrices that a checkpoint does not store as floats.

    `config`: the `quantization_config` of the model; None: all matrices are floats, and the result is empty. Raises
    TandemError, which names the field or value that is not supported."""
    if not config:
        return ()
    method = config.get("quant_method")
    if method not in _READERS:
        raise _refused(f"quant_method={method!r} (known: {', '.join(_READERS)})")
    read, fields = _READERS[method]
    for name, value in config.items():
        if value and name not in fields and name not in _HARMLESS:
            raise _refused(f"{name}={value!r}")
    return tuple(read(config))


def _fp8(config: Json) -> Formats:
    _expect(config, "fmt", None, "e4m3", "float8_e4m3fn", "float")
    _expect(config, "scale_fmt", None, "float")
    _expect(config, "expert_dtype", None, "fp8")
    size = config.get("weight_block_size", [128, 128])  # transformers' default
    block = None if size is None else _block({"weight_block_size": size}, "weight_block_size")
    # AutoFP8 leaves the field out, and has one scale per matrix, under another name.
    return [float8_format("fp8", ".weight_scale_inv", block), float8_format("fp8", ".weight_scale")]


def _fbgemm_fp8(_: Json) -> Formats:
    return [float8_format("fbgemm_fp8", ".weight_scale")]


def _modelopt(config: Json) -> Formats:
    if config.get("quant_algo") is None:
        return []  # only KV is to be rounded
    kind = str(config["quant_algo"]).upper()
    if kind in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return [float8_format(f"modelopt {kind}", ".weight_scale")]
    if kind not in ("NVFP4", "W4A16_NVFP4"):
        raise _refused(f"quant_algo={kind!r}")
    _expect(config, "group_size", None, 16)
    return [MODELOPT_NVFP4]


def _gptq(config: Json) -> Formats:
    _expect(config, "bits", 4)
    _expect(config, "pack_dtype", None, "int32")
    # The two names of one field; newer files have both.
    name = "checkpoint_format" if config.get("checkpoint_format") else "format"
    _expect(config, name, None, "gptq", "gptq_v2")
    _expect(config, "format", None, config.get(name))
    # A rule that begins with "-:" names modules that are floats, which is seen by their tensors.
    if rules := {rule: value for rule, value in (config.get("dynamic") or {}).items() if not rule.startswith("-:")}:
        raise _refused(f"dynamic={rules!r}")
    return [gptq_format(0 if config.get(name) == "gptq_v2" else 1)]


def _awq(config: Json) -> Formats:
    _expect(config, "bits", 4)
    _expect(config, "zero_point", True)
    _expect(config, "version", None, "gemm", "GEMM")
    _expect(config, "format", None, "gemm")
    return [awq_format(_number(config.get("group_size")))]


def _gguf(_: Json) -> Formats:
    return [*GGUF_FORMATS.values()]


def _compressed_tensors(config: Json) -> Formats:
    groups = [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]
    if not groups or any(group != groups[0] for group in groups):
        raise _refused(f"{len(groups)} config_groups (one way to store weights is needed)")
    sparsity = config.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refused(f"sparsity_config={sparsity!r}")
    weights, kind = groups[0], config.get("format")
    _expect(weights, "symmetric", True)
    _expect(weights, "actorder", None, False, "static", "weight")
    bits = {"float-quantized": ("float", 8), "int-quantized": ("int", 8), "pack-quantized": ("int", 4)}
    bits |= {"nvfp4-pack-quantized": ("float", 4), "mxfp4-pack-quantized": ("float", 4)}
    if kind not in bits:
        raise _refused(f"format={kind!r} (known: {', '.join(bits)})")
    _expect(weights, "type", bits[kind][0])
    _expect(weights, "num_bits", bits[kind][1])
    if kind == "nvfp4-pack-quantized":
        _expect(weights, "strategy", "tensor_group")
        _expect(weights, "group_size", None, 16)
        return [NVFP4]
    if kind == "mxfp4-pack-quantized":
        _expect(weights, "strategy", "group")
        _expect(weights, "group_size", 32)
        return [MXFP4]
    if kind == "pack-quantized":
        _expect(weights, "strategy", "group", "channel")
        return [packed_int4_format(_number(weights.get("group_size")) if weights["strategy"] == "group" else 0)]
    if bits[kind][0] == "int":
        _expect(weights, "strategy", "channel", "tensor")
        return [INT8]
    _expect(weights, "strategy", "channel", "tensor", "block")
    block = _block(weights, "block_structure") if weights["strategy"] == "block" else None
    return [float8_format("compressed-tensors float-quantized", ".weight_scale", block)]


_READERS: dict[Any, tuple[Callable[[Json], Formats], frozenset[str]]] = {
    "fp8": (_fp8, frozenset({"expert_dtype", "fmt", "scale_fmt", "weight_block_size"})),
    "fbgemm_fp8": (_fbgemm_fp8, frozenset({"activation_scale_ub"})),
    "modelopt": (_modelopt, frozenset({"config_groups", "group_size", "quant_algo", "quantized_layers"})),
    "compressed-tensors": (_compressed_tensors, frozenset({"config_groups", "format", "sparsity_config"})),
    "gptq": (_gptq, frozenset({"bits", "checkpoint_format", "dynamic", "format", "group_size", "pack_dtype"})),
    "awq": (_awq, frozenset({"bits", "format", "group_size", "zero_point"})),
    "gguf": (_gguf, frozenset()),
}
"""For each `quant_method`: its reader, and the names of the fields that the reader uses. The groups of `modelopt` only
repeat what its `quant_algo` says."""


def _expect(config: Json, name: str, *values: Any) -> None:
    """Raise TandemError unless a field has one of some values; None stands for a field that is missing."""
    if (found := config.get(name)) not in values:
        raise _refused(f"{name}={found!r}")


def _block(config: Json, name: str) -> tuple[int, int]:
    """Return how many rows and columns share a scale, from the field `name`, a list of these two numbers.

    Raises TandemError for any other value."""
    block = config.get(name)
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise _refused(f"{name}={block!r}")
    return block[0], block[1]


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise _refused(f"group_size={value!r}")
    return value


def _refused(what: str) -> Exception:
    return unsupported(f"quantization_config with {what}")
