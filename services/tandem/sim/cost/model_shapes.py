"""Compute the weights, bytes and operations of a model from its sizes, which are those of `core.model_catalog`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tandem.core.model_catalog import PUBLISHED
from tandem.kv.layout import KVGroup, KVLayout

Precision = Literal["bf16", "fp8"]
BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 1}
DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with gated feed-forward layers, dense or mixtures of experts, and grouped-query attention.

    `feed_forward`: width of a dense layer. `expert_layers`: number of layers with experts. Each of them has `experts`
    experts of width `expert_inner`, of which a token passes through `chosen`, and one shared expert of width
    `shared_inner`, which all tokens pass through. `is_tied`: embedding and head are one matrix; both stay in bf16 where
    the layers are in fp8. `provenance`: the source of the sizes. Weights of norms and biases are left out: they are
    under 0.01 % of all weights.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    is_tied: bool
    provenance: str
    expert_layers: int = 0
    experts: int = 1
    chosen: int = 1
    expert_inner: int = 0
    shared_inner: int = 0

    @property
    def common_weights(self) -> int:
        """Return the number of weights, in all layers together, that every token passes through."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        dense = (self.layers - self.expert_layers) * self.feed_forward
        router = self.expert_layers * self.hidden * self.experts if self.expert_layers else 0
        return self.layers * attention + 3 * self.hidden * (dense + self.expert_layers * self.shared_inner) + router

    @property
    def expert_weights(self) -> int:
        """Return the number of weights of all experts, in all layers together; a token passes through some of them."""
        return 3 * self.hidden * self.expert_layers * self.experts * self.expert_inner

    @property
    def active_weights(self) -> int:
        """Return the number of weights, in all layers together, that one token passes through."""
        return self.common_weights + self.expert_weights * self.chosen // self.experts

    def touched(self, num_tokens: int) -> float:
        """Return the expected share of a layer's experts that at least one of `num_tokens` tokens passes through, if
        tokens choose all experts with equal probability."""
        return 1 - (1 - self.chosen / self.experts) ** num_tokens

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    def step_bytes(self, weights: Precision = "bf16") -> int:
        """Return the bytes of weights that a large step reads: all layers, in the precision `weights`, and the head."""
        return BYTES[weights] * (self.common_weights + self.expert_weights) + BYTES["bf16"] * self.head_weights

    def weight_bytes(self, weights: Precision = "bf16") -> int:
        """Return the bytes that the whole model takes in memory, with layers in the precision `weights`."""
        return self.step_bytes(weights) + (0 if self.is_tied else BYTES["bf16"] * self.head_weights)

    @property
    def attention_pair_flops(self) -> int:
        """Return the operations of one token that attends to one other token: a product with the key and one with the
        value, in each layer."""
        return 4 * self.layers * self.heads * self.head_dim

    def layout(self, block_size: int, kv: Precision = "bf16") -> KVLayout:
        return KVLayout(block_size, (KVGroup(self.layers, self.kv_heads, self.head_dim, DTYPES[kv]),))


def _shape(name: str) -> ModelShape:
    published = PUBLISHED[name]
    config = published.config
    return ModelShape(
        name=name,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        feed_forward=config["intermediate_size"],
        **_experts(config),
        vocabulary=config["vocab_size"],
        is_tied=config["tie_word_embeddings"],
        provenance=published.provenance,
    )


def _experts(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of a shape that belong to experts; none for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((config[name] for name in names if name in config), 0)
    if not count:
        return {}
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    return {
        "expert_layers": config["num_hidden_layers"] - config.get("first_k_dense_replace", 0),
        "experts": count,
        "chosen": config["num_experts_per_tok"],
        "expert_inner": inner,
        "shared_inner": inner * config.get("n_shared_experts", 0) + config.get("shared_expert_intermediate_size", 0),
    }


SHAPES = {name: _shape(name) for name in PUBLISHED}
"""The shapes of all models of the catalog by name."""

LLAMA_8B, LLAMA_70B = SHAPES["llama-3.1-8b"], SHAPES["llama-3.1-70b"]
