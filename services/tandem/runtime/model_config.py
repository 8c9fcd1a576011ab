"""Parse config.json of a Llama-family model into a frozen `DecoderConfig`; reject models with unsupported features.

Every field of the file must be implemented here, known to be harmless, or unset. Any other field is an error that names
it, because a field that is silently ignored would give wrong tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.core.errors import ErrorKind, TandemError

Json = Mapping[str, Any]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ACTIVATIONS = ("silu", "swish")

_SIZES = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    }
)
_IMPLEMENTED = _SIZES | {
    "model_type",
    "architectures",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "eos_token_id",
    "bos_token_id",
}
# Fields for training, metadata or other programs: no effect on logits.
_HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "attention_dropout",
        "decoder_start_token_id",
        "dtype",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "return_dict",
        "sep_token_id",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
# Values at which an unimplemented field has no effect.
_NEUTRAL: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "chunk_size_feed_forward": 0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_experts": 0,
    "num_local_experts": 0,
    "partial_rotary_factor": 1.0,
    "residual_multiplier": 1.0,
}
_ROPE_OPTIONAL = frozenset(
    {
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }
)
_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": _ROPE_OPTIONAL | {"factor"},
}
_DEFAULT_THETA = 10_000.0
_MISTRAL_WINDOW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of rotary position embeddings, named and defined as in transformers' `rope_parameters`.

    `kind`: default, linear, llama3 or yarn; a field that the kind does not use keeps its default. `theta`: base of the
    frequencies. `factor`: by how much the context is extended. `original_length`: context length in tokens before that
    extension. The other fields shape the extension of the kinds llama3 and yarn."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __str__(self) -> str:
        fields = (getattr(self, name) for name in self.__slots__)
        return ",".join(str(value) for value in fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Architecture of a Llama-family decoder, as far as its results depend on it.

    `hidden_size`: components of a hidden row. `intermediate_size`: width of the MLP. `heads`, `kv_heads`: numbers of
    query heads and of KV heads. `max_length`: longest context in tokens. `tied_embeddings`: the output head is the
    embedding table. `qkv_bias`, `output_bias`, `mlp_bias`: whether these projections have biases. `qk_norm`: queries
    and keys are normalized per head."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None


def read_model_config(directory: Path) -> DecoderConfig:
    """Read and parse `config.json` of a model directory.

    Raises TandemError(MODEL_NOT_FOUND) when the file is missing, and TandemError(UNSUPPORTED) when it is not a JSON
    object or a field is unsupported; the message names the field."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TandemError(
            ErrorKind.MODEL_NOT_FOUND, f"{directory} is not a model directory: it has no config.json", param="model"
        ) from None
    except (ValueError, RecursionError) as error:
        raise unsupported(f"{path} is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise unsupported(f"{path} is not a JSON object")
    try:
        return parse_model_config(raw)
    except TandemError as error:
        raise TandemError(error.kind, f"{path}: {error.message}", param=error.param) from None


def parse_model_config(raw: Json) -> DecoderConfig:
    """Build the decoder configuration from `raw`, the parsed content of a config.json.

    Raises TandemError(UNSUPPORTED) that names the field for a feature that is not implemented or a missing size, and
    one with Python's reason for a value of a wrong type."""
    try:
        return _decoder_config(raw)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise unsupported(f"config.json has a value of a wrong type: {error}") from None


def _decoder_config(raw: Json) -> DecoderConfig:
    model_type = _model_type(raw)
    _refuse_unknown(raw)
    _refuse_windows(raw, model_type)
    heads = _size(raw, "num_attention_heads")
    kv_heads = _size(raw, "num_key_value_heads", heads)
    hidden = _size(raw, "hidden_size")
    if heads % kv_heads:
        raise unsupported(f"num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    head_dim = _size(raw, "head_dim", 128 if model_type == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise unsupported(f"head_dim={head_dim} is odd")
    if raw.get("hidden_act", "silu") not in _ACTIVATIONS:
        raise unsupported(f"hidden_act={raw['hidden_act']!r}")
    length = _size(raw, "max_position_embeddings")
    rope = _rope(raw, length)
    attention_bias, mlp_bias = _biases(raw, model_type)
    return DecoderConfig(
        model_type=model_type,
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(raw, "intermediate_size"),
        layers=_size(raw, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=_max_length(rope, length),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=model_type == "qwen3",
        eos_token_ids=token_ids(raw.get("eos_token_id")),
        bos_token_id=raw.get("bos_token_id"),
    )


def unsupported(what: str) -> TandemError:
    """Return, without raising it, the TandemError(UNSUPPORTED) for a model with the feature that `what` names."""
    return TandemError(ErrorKind.UNSUPPORTED, f"this model is not supported: {what}", param="model")


def token_ids(value: Any) -> frozenset[int]:
    """Return the token ids in a field such as `eos_token_id` as a set; empty for None.

    `value` is an id, a list of ids or None."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({int(value)})


def _model_type(raw: Json) -> str:
    model_type = raw.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise unsupported(f"model_type={model_type!r} (known: {', '.join(_ARCHITECTURES)})")
    architectures = raw.get("architectures") or [_ARCHITECTURES[model_type]]
    if architectures != [_ARCHITECTURES[model_type]]:
        raise unsupported(f"architectures={architectures!r}")
    return str(model_type)


def _biases(raw: Json, model_type: str) -> tuple[bool, bool]:
    """Return whether attention projections and MLP projections have biases.

    Qwen2's biases on query, key and value are implied by the model type and not counted here."""
    attention, mlp = bool(raw.get("attention_bias")), bool(raw.get("mlp_bias"))
    if attention and model_type not in ("llama", "qwen3"):
        raise unsupported(f"attention_bias in a {model_type} model")
    if mlp and model_type != "llama":
        raise unsupported(f"mlp_bias in a {model_type} model")
    return attention, mlp


def _refuse_unknown(raw: Json) -> None:
    for name, value in raw.items():
        if name in _IMPLEMENTED or name in _HARMLESS or _is_unset(value):
            continue
        if name in _NEUTRAL and value == _NEUTRAL[name]:
            continue
        raise unsupported(f"{name}={value!r}")


def _is_unset(value: Any) -> bool:
    """Return whether a value is None, False or an empty container; the number 0 counts as set."""
    return value is None or value is False or value in ("", [], {})


def _refuse_windows(raw: Json, model_type: str) -> None:
    """Raise TandemError if the model uses sliding-window attention.

    A window is in use when it is shorter than the longest sequence."""
    types = raw.get("layer_types") or []
    for kind in types:
        if kind != "full_attention":
            raise unsupported(f"layer_types contains {kind!r}")
    if model_type in ("qwen2", "qwen3"):
        layers = _size(raw, "num_hidden_layers")
        if raw.get("use_sliding_window") and not types and raw.get("max_window_layers", 28) < layers:
            raise unsupported("use_sliding_window=True")
        return
    if raw.get("use_sliding_window"):
        raise unsupported(f"use_sliding_window in a {model_type} model")
    # An absent field means the default of transformers, which for Mistral is a window.
    window = raw.get("sliding_window", _MISTRAL_WINDOW if model_type == "mistral" else None)
    if window is not None and window < _size(raw, "max_position_embeddings"):
        raise unsupported(f"sliding_window={window}")


def _size(raw: Json, name: str, default: int | None = None) -> int:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise unsupported(f"{name}={raw.get(name)!r} (a positive number is needed)")
    return value


def _rope(raw: Json, length: int) -> RopeConfig:
    """Parse either spelling: `rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    fields = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    legacy_kind = fields.pop("type", None)
    kind = fields.pop("rope_type", None) or legacy_kind or "default"
    if kind not in _ROPE_KEYS:
        raise unsupported(f"rope type {kind!r} (known: {', '.join(_ROPE_KEYS)})")
    theta = float(fields.pop("rope_theta", None) or raw.get("rope_theta") or _DEFAULT_THETA)
    if fields.pop("partial_rotary_factor", None) not in (None, 1.0):
        raise unsupported("partial_rotary_factor")
    known = _ROPE_KEYS[kind]
    values = {k: v for k, v in fields.items() if v is not None and (k in known or not _is_unset(v))}
    for name in sorted(values.keys() - known):
        raise unsupported(f"{name}={values[name]!r} of rope type {kind!r}")
    for name in sorted(known - values.keys() - _ROPE_OPTIONAL):
        raise unsupported(f"rope type {kind!r} without {name}")
    if "original_max_position_embeddings" in known:
        original = raw.get("original_max_position_embeddings") or values.pop("original_max_position_embeddings", None)
        values.pop("original_max_position_embeddings", None)
        values["original_length"] = original or length
    return RopeConfig(theta=theta, kind=kind, **values)


def _max_length(rope: RopeConfig, length: int) -> int:
    """Return the longest context in tokens. YaRN checkpoints often state `length` as it was before the extension."""
    if rope.kind == "yarn" and rope.original_length is not None:
        return max(length, int(rope.original_length * rope.factor))
    return length
