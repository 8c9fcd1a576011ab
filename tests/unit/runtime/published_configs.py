"""config.json of published models, as their authors wrote them, without what every file has."""

from __future__ import annotations

from typing import Any

_COMMON: dict[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}

_QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip

PUBLISHED_CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": _COMMON | _QWEN3_30B_A3B,
    "Qwen3-30B-A3B-FP8": _COMMON | _QWEN3_30B_A3B | {
        "quantization_config": _FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
    },
    "Qwen3-Coder-30B-A3B": _COMMON | _QWEN3_30B_A3B | {
        "max_position_embeddings": 262144, "qkv_bias": False, "rope_theta": 10000000,
        "shared_expert_intermediate_size": 0, "use_qk_norm": True,
    },
    "phi-4": _COMMON | {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "auto_map": {}, "bos_token_id": 100257,
        "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_size": 5120, "intermediate_size": 17920,
        "max_position_embeddings": 16384, "model_type": "phi3", "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 10, "original_max_position_embeddings": 16384, "pad_token_id": 100349,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 100352,
    },
    "Phi-4-mini-instruct": _COMMON | {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "auto_map": {}, "bos_token_id": 199999,
        "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1, "hidden_size": 3072, "interpolate_factor": 1,
        "intermediate_size": 8192, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1.5] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
        "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "Mixtral-8x7B-Instruct": _COMMON | {
        "architectures": ["MixtralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "GLM-4.5-Air": _COMMON | {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "pad_token_id": 151329,
        "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
        "norm_topk_prob": True, "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 1000000, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "use_qk_norm": False,
        "intermediate_size": 10944, "vocab_size": 151552,
    },
    "SmolLM3-3B": _COMMON | {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "bos_token_id": None, "eos_token_id": 128012,
        "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
        "max_window_layers": 28,
        "max_position_embeddings": 65536, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "Qwen1.5-MoE-A2.7B": _COMMON | {
        "architectures": ["Qwen2MoeForCausalLM"], "bos_token_id": 151643, "decoder_sparse_step": 1,
        "eos_token_id": 151643, "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "OLMoE-1B-7B": _COMMON | {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279,
        "hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe",
        "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 16, "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False, "vocab_size": 50304,
    },
    "granite-3.1-3b-a800m": _COMMON | {
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
        "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_size": 1536,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 131072,
        "model_type": "granitemoe", "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_local_experts": 40, "output_router_logits": False, "pad_token_id": 0,
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.0, "tie_word_embeddings": True, "vocab_size": 49155,
    },
    "GLM-4-9B-0414": _COMMON | {
        "architectures": ["Glm4ForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768,
        "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "vocab_size": 151552,
    },
    "OLMo-2-1124-7B": _COMMON | {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "eos_token_id": 100257, "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
}  # fmt: skip
