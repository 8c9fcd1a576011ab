"""Define `DecoderSpec`, the description of a decoder as data, and the classes of its fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tandem.runtime.architectures.stored_format import StoredFormat
from tandem_kernels.contract import ExpertRouting


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of rotary position embeddings, named and defined as in transformers' `rope_parameters`.

    `kind`: default, linear, llama3, yarn or longrope; a field that the kind does not use keeps its default. `theta`:
    base of the frequencies. `factor`: factor by which the context is extended. `original_length`: context length in
    tokens before the extension. The fields from `low_freq_factor` to `truncate` are parameters of the extension in the
    kinds llama3, yarn and longrope. `rotary_dim`: number of leading components of a head that are rotated; None: all.
    `is_interleaved`: whether the checkpoint pairs each rotated component with its neighbour instead of with the
    component `rotary_dim / 2` away. `short_factor`, `long_factor`: numbers by which LongRoPE divides the frequencies,
    for contexts of up to `original_length` tokens and for longer ones. `is_long`: whether contexts may be longer than
    `original_length`, so that `long_factor` applies."""

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
    """Description of a gated MLP.

    `inner`: width of the MLP, the number of outputs of its gate projection and of its up projection. `has_bias`:
    whether its three projections have biases."""

    inner: int
    has_bias: bool = False

    @property
    def active_inner(self) -> int:
        return self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsMlp:
    """Description of a mixture of experts: gated MLPs, of which a router chooses some for each row.

    `count`: number of experts. `inner`: width of each expert. `routing`: how the experts of a row are chosen and
    weighted. `shared_inner`: width of a shared MLP that every row passes through as well; 0: there is none.
    `has_shared_gate`: whether the shared MLP's result is multiplied by a gate, the sigmoid of the row's product with a
    weight vector. `has_choice_bias`: whether a bias per expert is added to the router's scores when experts are chosen,
    but not when their results are weighted. `routes_in_float32`: whether the router's product is computed in float32
    even if rows have another dtype."""

    count: int
    inner: int
    routing: ExpertRouting
    shared_inner: int = 0
    has_shared_gate: bool = False
    has_choice_bias: bool = False
    routes_in_float32: bool = False

    @property
    def active_inner(self) -> int:
        """Return the sum of the widths of the MLPs that a row passes through: its chosen experts and the shared MLP."""
        return self.routing.num_chosen * self.inner + self.shared_inner


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Description of one decoder layer: the properties in which the layers of one decoder may differ.

    `mlp`: the layer's MLP or mixture of experts. `has_rope`: whether the layer rotates queries and keys."""

    mlp: DenseMlp | ExpertsMlp
    has_rope: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """Names of a layer's tensors in a checkpoint, without the prefix `model.layers.N.` and the suffix `.weight`.

    `attention_norm`, `mlp_norm`: norms of the inputs of attention and of the MLP. `after_attention_norm`,
    `after_mlp_norm`: norms of the results of attention and of the MLP, before these are added to the hidden rows. A
    norm that is None does not exist. `qkv`, `gate_up`, `expert_gate_up` and `shared_gate_up` have one name per
    projection, or a single name if the checkpoint stores these projections as one matrix. A name with `{}` stands for
    one tensor per expert; the name of an expert's projection without `{}` stands for one tensor of all experts.
    `choice_bias` is a tensor without the suffix `.weight`."""

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
    """Architecture of a decoder: its sizes, its layers and their features, and the names of its weights.

    - `hidden_size`: components of a hidden row. `heads`, `kv_heads`: numbers of query heads and of KV heads.
      `head_dim`: components of a head. `max_length`: longest context in tokens. `rope`: parameters of rotary
      embeddings. `layers`: one description per layer.
    - `tied_embeddings`: whether the output head is the embedding table. `qkv_bias`: whether the projections to queries,
      keys and values have biases. `output_bias`: whether the output projection of attention has a bias.
    - `query_key_norm`: whether queries and keys are normalised not at all ("none"), each head by itself ("head"), or
      all heads of a row together ("row").
    - `attention_scale`: factor on products of queries and keys. `embedding_multiplier`: factor on embeddings.
      `residual_multiplier`: factor on the results of attention and MLP when they are added to a row. `logits_divisor`:
      number by which logits are divided.
    - `names`: names of a layer's weights. `num_extra_layers`: number of layers after the last used one that the
      checkpoint has and the decoder ignores. `stored`: formats of the checkpoint's matrices that are not floats."""

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
        """Return the sum of the widths of the MLPs that one row passes through in the widest layer.

        See `ExpertsMlp.active_inner`."""
        return max(layer.mlp.active_inner for layer in self.layers)
