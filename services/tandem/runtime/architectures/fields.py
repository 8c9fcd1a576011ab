"""Read the fields of a config.json, and raise an error for a field that is set but was not read.

If such a field were ignored, the model would compute wrong tokens.
"""

from __future__ import annotations

from typing import Any

from tandem.runtime.architectures.refusal import Json, unsupported
from tandem.runtime.architectures.spec import RopeConfig

_ACTIVATIONS = ("silu", "swish")
# Fields for training, metadata or other programs: no effect on logits.
_HARMLESS = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_length",
        "max_sequence_length",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)
# Values at which a field that no family reads has no effect.
_NEUTRAL: dict[str, Any] = {
    "attention_multiplier": 1.0,
    "chunk_size_feed_forward": 0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_experts": 0,
    "num_local_experts": 0,
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
_LONGROPE_KEYS = frozenset({"short_factor", "long_factor"})
_ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": _ROPE_OPTIONAL | {"factor"},
    "longrope": _LONGROPE_KEYS | {"factor", "attention_factor", "original_max_position_embeddings"},
}
_OLD_NAMES = {"su": "longrope"}
_DEFAULT_THETA = 10_000.0
_MOST_LAYERS = 1024


def token_ids(value: Any) -> frozenset[int]:
    """Return the token ids in a field such as `eos_token_id` as a set; empty for None.

    `value` is an id, a list of ids or None."""
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset({int(value)})


class Fields:
    """Read the fields of one config.json, and record which fields were read.

    Each method that returns a field's value marks the field as read. `finish` raises an error for a field that is set
    and was not read."""

    def __init__(self, raw: Json) -> None:
        self._raw = raw
        self._read: set[str] = set()
        self.model_type: str = raw["model_type"]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the field `name`, or `default` if config.json lacks the field; null counts as a value."""
        self._read.add(name)
        return self._raw.get(name, default)

    def size(self, name: str, default: int | None = None) -> int:
        """Return the positive integer in the field `name`, or `default` if the field is missing or null.

        Raises TandemError if the field has any other value, or if it is missing or null and `default` is None."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise unsupported(f"{name}={self._raw.get(name)!r} (a positive number is needed)")
        return value

    def size_of_any(self, *names: str) -> int:
        """Return the positive integer in the first of the fields `names` that is set. Raises TandemError if none is
        set."""
        values = [self.size(name) for name in names if self.get(name) is not None]
        if not values:
            raise unsupported(f"neither {' nor '.join(names)} is set")
        return values[0]

    def num_layers(self, name: str = "num_hidden_layers", default: int | None = None) -> int:
        """Return the number of layers in the field `name`, or `default` if the field is missing or null.

        Raises TandemError if the number of layers is not an integer from 1 to 1,024."""
        number = self.size(name, default)
        if number > _MOST_LAYERS:
            raise unsupported(f"{name}={number} (at most {_MOST_LAYERS})")
        return number

    def expect(self, name: str, value: Any) -> None:
        """Raise TandemError unless the field `name` is missing, null or equal to `value`, the only value that is
        implemented."""
        if (found := self.get(name)) not in (None, value):
            raise unsupported(f"{name}={found!r} in a {self.model_type} model")

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        return float(default if value is None else value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        return default if value is None else bool(value)

    def require_silu(self) -> None:
        """Raise TandemError unless the activation is SiLU."""
        if (name := self.get("hidden_act", "silu")) not in _ACTIVATIONS:
            raise unsupported(f"hidden_act={name!r}")

    def refuse_window(self, default: int | None = None) -> None:
        """Raise TandemError if attention has a sliding window shorter than the model's longest context.

        `default`: window in tokens of a model whose config.json has no field `sliding_window`; None: it has no window.
        """
        self.refuse_window_if_on()
        window = self.get("sliding_window", default)
        if window is not None and window < self.size("max_position_embeddings"):
            raise unsupported(f"sliding_window={window}")

    def refuse_window_if_on(self) -> None:
        """Raise TandemError if the field `use_sliding_window` is set, or if `layer_types` lists a layer without full
        attention.

        The other fields that describe the window are marked as read, because they have no effect while
        `use_sliding_window` is not set."""
        self._layer_types()
        for name in ("sliding_window", "max_window_layers"):
            self.get(name)
        self.expect("use_sliding_window", value=False)

    def refuse_window_of_last_layers(self) -> None:
        """Raise TandemError if some layers of a Qwen model have a sliding window.

        In these models the first `max_window_layers` layers have full attention, and the others have a window if
        `use_sliding_window` is set. If config.json lists the kind of attention of each layer, only this list decides.
        """
        types = self._layer_types()
        self.get("sliding_window")
        is_on, num_full = self.get("use_sliding_window"), self.get("max_window_layers", 28)
        if is_on and not types and num_full < self.num_layers():
            raise unsupported("use_sliding_window=True")

    def _layer_types(self) -> list[str]:
        """Return the kinds of attention that config.json lists, one for each layer; empty if it lists none.

        Raises TandemError for a kind that is not implemented."""
        types = self.get("layer_types") or []
        for kind in types:
            if kind != "full_attention":
                raise unsupported(f"layer_types contains {kind!r}")
        return list(types)

    def rope(
        self,
        head_dim: int,
        *,
        partial: float | None = None,
        is_interleaved: bool = False,
        theta: float = _DEFAULT_THETA,
    ) -> RopeConfig:
        """Return the parameters of rotary embeddings, from `rope_parameters` or the older `rope_theta` and
        `rope_scaling`.

        `head_dim`: components of a head. `partial`: fraction of a head that is rotated if no field states it; None:
        models of this family rotate whole heads, and a smaller fraction in a field is an error. `is_interleaved`: see
        `RopeConfig`. `theta`: base of the frequencies if no field states it. Raises TandemError for a field that is
        missing, unknown or not implemented."""
        length = self.size("max_position_embeddings")
        stated, scaling = self.get("rope_parameters"), self.get("rope_scaling")
        fields = dict(stated or scaling or {})
        legacy_kind = fields.pop("type", None)
        kind = fields.pop("rope_type", None) or legacy_kind or "default"
        kind = _OLD_NAMES.get(kind, kind)
        if kind not in _ROPE_KEYS:
            raise unsupported(f"rope type {kind!r} (known: {', '.join(_ROPE_KEYS)})")
        stated_theta = self.get("rope_theta")
        theta = float(fields.pop("rope_theta", None) or stated_theta or theta)
        rotary_dim = self._rotary_dim(fields.pop("partial_rotary_factor", None), partial, head_dim)
        known = _ROPE_KEYS[kind]
        values = {k: v for k, v in fields.items() if v is not None and (k in known or not _is_unset(v))}
        for name in sorted(values.keys() - known):
            raise unsupported(f"{name}={values[name]!r} of rope type {kind!r}")
        optional = _ROPE_OPTIONAL | ({"factor"} if kind == "longrope" else set())
        for name in sorted(known - values.keys() - optional):
            raise unsupported(f"rope type {kind!r} without {name}")
        original = self.get("original_max_position_embeddings")
        if "original_max_position_embeddings" in known:
            original = original or values.pop("original_max_position_embeddings", None)
            values.pop("original_max_position_embeddings", None)
            values["original_length"] = original or length
        if kind == "longrope":
            values.setdefault("factor", length / values["original_length"])
            for name in _LONGROPE_KEYS:
                values[name] = _factors(name, values[name], (rotary_dim or head_dim) // 2)
        return RopeConfig(theta=theta, kind=kind, rotary_dim=rotary_dim, is_interleaved=is_interleaved, **values)

    def _rotary_dim(self, in_rope: Any, default: float | None, head_dim: int) -> int | None:
        stated = self.get("partial_rotary_factor")
        factor = float(next((value for value in (in_rope, stated, default) if value is not None), 1.0))
        dim = int(head_dim * factor)
        if not 0 < dim <= head_dim or dim % 2:
            raise unsupported(f"partial_rotary_factor={factor} of heads of {head_dim}")
        if dim < head_dim and default is None:
            raise unsupported(f"partial_rotary_factor={factor} in a {self.model_type} model")
        return dim if dim < head_dim else None

    def finish(self) -> None:
        """Raise TandemError for the first field that is set and was not read, unless it is known to have no effect on
        logits."""
        for name, value in self._raw.items():
            if name in self._read or name in _HARMLESS or _is_unset(value):
                continue
            if name in _NEUTRAL and value == _NEUTRAL[name]:
                continue
            raise unsupported(f"{name}={value!r}")


def _factors(name: str, value: Any, count: int) -> tuple[float, ...]:
    """Return the numbers in the list `value`, by which LongRoPE divides the `count` frequencies.

    Raises TandemError if there are not `count` of them."""
    factors = tuple(float(each) for each in value)
    if len(factors) != count:
        raise unsupported(f"{name} of {len(factors)} numbers for {count} frequencies")
    return factors


def _is_unset(value: Any) -> bool:
    """Return whether a value is None, False or an empty container; the number 0 counts as set."""
    return value is None or value is False or value in ("", [], {})
