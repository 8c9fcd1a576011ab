"""List the shapes of published models under the field names of their config.json, without weights or tokenizers.

The simulator's roofline and models of random weights need shapes without files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a published model. `config` holds the fields of its config.json that define the computation;
    `provenance` is the source of the numbers."""

    config: Mapping[str, Any]
    provenance: str


_ROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1_000_000.0}


def _decoder(
    model_type: str, sizes: tuple[int, ...], max_length: int, eps: float, is_tied: bool, rope: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config.json fields of a decoder. `sizes`: numbers of layers, hidden size, attention heads, KV heads,
    head dimension, feed-forward size, vocabulary size."""
    layers, hidden, heads, kv_heads, head_dim, feed_forward, vocabulary = sizes
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "max_position_embeddings": max_length,
        "rms_norm_eps": eps,
        "tie_word_embeddings": is_tied,
        "rope_parameters": dict(rope),
    }


def _llama(sizes: tuple[int, ...], is_tied: bool, rope_factor: float) -> dict[str, Any]:
    """Return the config of a Llama 3.1 or 3.2, whose RoPE is scaled from 8,192 positions."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": rope_factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _decoder("llama", sizes, 131_072, 1e-5, is_tied, rope)


def _qwen3(sizes: tuple[int, ...]) -> dict[str, Any]:
    return _decoder("qwen3", sizes, 40_960, 1e-6, False, _ROPE)


def _qwen3_moe(sizes: tuple[int, ...], expert_inner: int) -> dict[str, Any]:
    return _decoder("qwen3_moe", sizes, 40_960, 1e-6, False, _ROPE) | {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_inner,
        "norm_topk_prob": True,
    }


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GLM_AIR = {
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}

RANDOM_PREFIX = "random:"
"""Start of a model id that asks for the shape of a published model with random weights."""

PUBLISHED: Mapping[str, ModelSpec] = {
    "llama-3.1-8b": ModelSpec(
        _llama((32, 4096, 32, 8, 128, 14336, 128256), False, 8.0), "config.json of meta-llama/Llama-3.1-8B"
    ),
    "llama-3.1-70b": ModelSpec(
        _llama((80, 8192, 64, 8, 128, 28672, 128256), False, 8.0), "Llama 3.1 70B model table of Oumi's recipes"
    ),
    "llama-3.2-1b": ModelSpec(
        _llama((16, 2048, 32, 8, 64, 8192, 128256), True, 32.0), "config.json of meta-llama/Llama-3.2-1B"
    ),
    "qwen3-8b": ModelSpec(_qwen3((36, 4096, 32, 8, 128, 12288, 151936)), "config.json of a fine-tune of Qwen/Qwen3-8B"),
    "qwen3-32b": ModelSpec(
        _qwen3((64, 5120, 64, 8, 128, 25600, 151936)),
        "config.json of T-pro-it-2.0, a Qwen3-32B; its vocabulary is Qwen/Qwen3-32B's",
    ),
    "mixtral-8x7b": ModelSpec(
        _decoder("mixtral", (32, 4096, 32, 8, 128, 14336, 32000), 32_768, 1e-5, False, _ROPE) | _MIXTRAL,
        "config.json of mistralai/Mixtral-8x7B-v0.1",
    ),
    "qwen3-30b-a3b": ModelSpec(
        _qwen3_moe((48, 2048, 32, 4, 128, 6144, 151936), 768), "config.json of Qwen/Qwen3-30B-A3B"
    ),
    "qwen3-235b-a22b": ModelSpec(
        _qwen3_moe((94, 4096, 64, 4, 128, 12288, 151936), 1536), "config.json of Qwen/Qwen3-235B-A22B"
    ),
    "glm-4.5-air": ModelSpec(
        _decoder("glm4_moe", (46, 4096, 96, 8, 128, 10944, 151552), 131_072, 1e-5, False, _ROPE) | _GLM_AIR,
        "config.json of zai-org/GLM-4.5-Air, without its layer that predicts a second token",
    ),
    "smollm2-135m": ModelSpec(
        _decoder("llama", (30, 576, 9, 3, 64, 1536, 49152), 8192, 1e-5, True, {**_ROPE, "rope_theta": 1e5}),
        "config.json of HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
"""Published models by name."""
