"""The sizes of models, from their published configurations; never holds a weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tandem.kv.layout import KVGroup, KVLayout

Precision = Literal["bf16", "fp8"]
BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 1}
DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with gated feed-forward and grouped queries. `is_tied`: embedding and head are one matrix; both
    stay in bf16 where the layers are in fp8. Weights of norms and biases are left out: under 0.01 % of all.
    `provenance`: where the sizes come from."""

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
        """Of all layers."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + 3 * self.hidden * self.feed_forward)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocabulary

    def step_bytes(self, weights: Precision = "bf16") -> int:
        """Weights that every step reads: all layers and the head."""
        return BYTES[weights] * self.layer_weights + BYTES["bf16"] * self.head_weights

    def weight_bytes(self, weights: Precision = "bf16") -> int:
        """Of the whole model in memory."""
        return self.step_bytes(weights) + (0 if self.is_tied else BYTES["bf16"] * self.head_weights)

    @property
    def attention_pair_flops(self) -> int:
        """Of one token that attends to one other: a product with its key and one with its value, in each layer."""
        return 4 * self.layers * self.heads * self.head_dim

    def layout(self, block_size: int, kv: Precision = "bf16") -> KVLayout:
        return KVLayout(block_size, (KVGroup(self.layers, self.kv_heads, self.head_dim, DTYPES[kv]),))


def _shape(name: str, source: str, is_tied: bool, *sizes: int) -> ModelShape:
    layers, hidden, heads, kv_heads, head_dim, feed_forward, vocabulary = sizes
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        is_tied=is_tied,
        provenance=source,
    )


LLAMA_8B = _shape("llama-3.1-8b", "config.json of meta-llama/Llama-3.1-8B", False, 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = _shape(
    "llama-3.1-70b", "Llama 3.1 70B model table of Oumi's recipes", False, 80, 8192, 64, 8, 128, 28672, 128256
)
QWEN_8B = _shape("qwen3-8b", "config.json of a fine-tune of Qwen/Qwen3-8B", False, 36, 4096, 32, 8, 128, 12288, 151936)
QWEN_32B = _shape(
    "qwen3-32b", "config.json of T-pro-it-2.0, a Qwen3-32B; its vocabulary is Qwen/Qwen3-32B's", False,
    64, 5120, 64, 8, 128, 25600, 151936,
)  # fmt: skip
SMOLLM_135M = _shape(
    "smollm2-135m", "config.json of HuggingFaceTB/SmolLM2-135M-Instruct", True, 30, 576, 9, 3, 64, 1536, 49152
)

SHAPES = {one.name: one for one in (LLAMA_8B, LLAMA_70B, QWEN_8B, QWEN_32B, SMOLLM_135M)}
"""By name."""
