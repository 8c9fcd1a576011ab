"""Define the description of a decoder: `DecoderSpec`, and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.runtime.architectures.stored_format import StoredFormat
from tandem_kernels.contract import ExpertRouting


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of rotary position embeddings, named and defined as in transformers' `rope_parameters`.

    `kind`: default, linear, llama3, yarn or longrope; a field that the kind does not use keeps its default. `theta`:
    base of the frequencies. `factor`: by how much the context is extended. `original_length`: context length in tokens
    before that extension. The fields up to `truncate` shape the extension of the kinds llama3 and yarn. `rotary_dim`:
    number of leading components of a head that are rotated; None: all. `is_interleaved`: in the checkpoint a component
    is rotated with its neighbour, not with the one half of `rotary_dim` away. `short_factor`, `long_factor`: by what
    LongRoPE divides each frequency, for contexts of up to `original_length` tokens and for longer ones; `is_long`: it
    is the latter."""

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
    rotary_dim: int | None = None
    is_interleaved: bool = False
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """Gated MLP of width `inner`."""

    inner: int
    has_bias: bool = False

    @property
    def active_inner(self) -> int:
        return self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsMlp:
    """Mixture of `count` gated MLPs of width `inner`, of which `routing` chooses some for each row.

    `shared_inner`: width of an MLP that every row passes through as well; 0: there is none. `has_shared_gate`: its
    result is multiplied by the sigmoid of a product with the row. `has_choice_bias`: a number per expert is added to
    the scores for the choice alone. `routes_in_float32`: the router's product is computed in float32 whatever the rows'
    dtype is."""

    count: int
    inner: int
    routing: ExpertRouting
    shared_inner: int = 0
    has_shared_gate: bool = False
    has_choice_bias: bool = False
    routes_in_float32: bool = False

    @property
    def active_inner(self) -> int:
        """Return the width that one row passes through."""
        return self.routing.num_chosen * self.inner + self.shared_inner


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Differences between the layers of a decoder. `has_rope`: the layer rotates queries and keys."""

    mlp: DenseMlp | ExpertsMlp
    has_rope: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of a layer's tensors in a checkpoint, below `model.layers.N.` and without `.weight`.

    A norm that is None does not exist. The `after_` norms are applied to what attention and MLP return, before it is
    added. `qkv`, `gate_up` and their like are one name where the checkpoint has one matrix. A name with `{}` stands for
    one tensor per expert; a name without it holds all experts.
    """

    attention_norm: str | None = "input_layernorm"
    after_attention_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    after_mlp_norm: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    output: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"
    shared_gate_up: tuple[str, ...] = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"


HeadNormKind = Literal["none", "head", "row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Architecture of a decoder, as far as its results depend on it.

    `hidden_size`: components of a hidden row. `heads`, `kv_heads`: numbers of query heads and of KV heads.
    `max_length`: longest context in tokens. `tied_embeddings`: the output head is the embedding table. `qkv_bias`,
    `output_bias`: whether these projections have biases. `query_key_norm`: queries and keys are normalised per head, or
    all heads of a row together. `attention_scale`: factor of products of queries and keys. `embedding_multiplier`,
    `residual_multiplier`: factors of embeddings, and of what attention and MLP add to a row. `logits_divisor`: logits
    are divided by it. `num_extra_layers`: layers of the checkpoint behind the last one, which are not used. `stored`:
    formats of the checkpoint's matrices that are not floats."""

    model_type: str
    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[LayerSpec, ...]
    tied_embeddings: bool
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    attention_scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    query_key_norm: HeadNormKind = "none"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    names: WeightNames = field(default_factory=WeightNames)
    num_extra_layers: int = 0
    stored: tuple[StoredFormat, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, ExpertsMlp) for layer in self.layers)

    @property
    def active_inner(self) -> int:
        """Return the greatest width of an MLP that one row passes through."""
        return max(layer.mlp.active_inner for layer in self.layers)
