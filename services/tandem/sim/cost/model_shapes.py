"""Compute the weights, bytes and operations of a model from its sizes, which are those of `core.model_catalog`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.core.model_catalog import PUBLISHED
from tandem.kv.layout import KVGroup, KVLayout

Precision = Literal["bf16", "fp8"]
BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 1}
DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense decoder with gated feed-forward layers and grouped-query attention.

    `is_tied`: embedding and head are one matrix; both stay in bf16 where the layers are in fp8. `provenance`: the
    source of the sizes. Weights of norms and biases are left out: they are under 0.01 % of all weights.
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

    @property
    def layer_weights(self) -> int:
        """Count the weights of all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    def step_bytes(self, weights: Precision = "bf16") -> int:
        """Return the bytes of weights that every step reads: all layers and the head."""
        return BYTES[weights] * self.layer_weights + BYTES["bf16"] * self.head_weights

    def weight_bytes(self, weights: Precision = "bf16") -> int:
        """Return the bytes of the whole model in memory."""
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
        vocabulary=config["vocab_size"],
        is_tied=config["tie_word_embeddings"],
        provenance=published.provenance,
    )


SHAPES = {name: _shape(name) for name in PUBLISHED}
"""The shapes of all models of the catalog by name."""

LLAMA_8B, LLAMA_70B = SHAPES["llama-3.1-8b"], SHAPES["llama-3.1-70b"]
QWEN_8B, QWEN_32B = SHAPES["qwen3-8b"], SHAPES["qwen3-32b"]
SMOLLM_135M = SHAPES["smollm2-135m"]
