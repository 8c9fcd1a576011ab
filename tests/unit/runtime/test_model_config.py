"""Test parsing of model configurations; a field that is in use and not supported is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.spec import DenseMlp, ExpertsMlp, LayerSpec
from tandem.runtime.architectures.table import FAMILIES
from tandem.runtime.model_config import parse_model_config, read_model_config
from tandem.runtime.rope_frequencies import inverse_frequencies, rope_order
from tandem_kernels.contract import ExpertRouting

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "initializer_range": 0.02,
}
_QWEN2 = _LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
_MISTRAL = _LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def test_llama() -> None:
    config = parse_model_config(_LLAMA)
    assert (config.num_layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rope.kind, config.rope.theta) == ("default", 500000.0)
    assert (config.qkv_bias, config.output_bias, config.query_key_norm) == (False, False, "none")
    assert config.layers == (LayerSpec(DenseMlp(128)),) * 2 and not config.has_experts
    assert config.eos_token_ids == {2, 3}
    assert config.max_length == 2048


def test_qwen2_has_biases_and_ignores_its_unused_window() -> None:
    config = parse_model_config(
        _QWEN2 | {"use_sliding_window": False, "sliding_window": 1024, "max_window_layers": 1, "eos_token_id": None}
    )
    assert (config.qkv_bias, config.output_bias, config.query_key_norm) == (True, False, "none")
    assert config.eos_token_ids == frozenset()


def test_qwen3_has_query_and_key_norms_and_free_head_size() -> None:
    config = parse_model_config(_QWEN3 | {"layer_types": ["full_attention"] * 2})
    assert (config.query_key_norm, config.head_dim, config.qkv_bias) == ("head", 32, False)


def test_mistral_window_that_is_never_reached_is_fine() -> None:
    assert parse_model_config(_MISTRAL | {"sliding_window": 2048}).model_type == "mistral"


def _family(model_type: str, **fields: Any) -> dict[str, Any]:
    return _LLAMA | {"model_type": model_type, "architectures": [FAMILIES[model_type].architecture]} | fields


_QWEN3_MOE = _family("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
_GLM4_MOE = _family(
    "glm4_moe", head_dim=32, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=2,
    n_group=4, topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=1, use_qk_norm=True,
)  # fmt: skip


def test_qwen3_moe_has_experts_in_the_layers_that_config_json_names() -> None:
    experts = ExpertsMlp(count=8, inner=32, routing=ExpertRouting(2, is_normalised=True))
    for fields, expected in (
        ({}, [experts, experts]),
        ({"mlp_only_layers": [1]}, [experts, DenseMlp(128)]),
        ({"decoder_sparse_step": 2}, [DenseMlp(128), experts]),
    ):
        spec = parse_model_config(_QWEN3_MOE | fields)
        assert [layer.mlp for layer in spec.layers] == expected and spec.has_experts
    assert spec.query_key_norm == "head" and spec.active_inner == 128


def test_glm4_moe_routes_by_groups_and_rotates_half_a_head() -> None:
    spec = parse_model_config(_GLM4_MOE)
    routing = ExpertRouting(2, scores="sigmoid", is_normalised=True, scaling=2.5, num_groups=4, num_chosen_groups=2)
    experts = ExpertsMlp(
        count=8, inner=48, routing=routing, shared_inner=96, has_choice_bias=True, routes_in_float32=True
    )
    assert [layer.mlp for layer in spec.layers] == [DenseMlp(128), experts]
    assert (spec.rope.rotary_dim, spec.rope.is_interleaved, spec.query_key_norm) == (16, False, "head")
    assert spec.names.shared_down == "mlp.shared_experts.down_proj"


def test_granite_has_multipliers_and_olmo2_its_norms_behind() -> None:
    granite = parse_model_config(
        _family("granite", attention_multiplier=0.1, residual_multiplier=0.2, embedding_multiplier=12, logits_scaling=8)
    )
    assert (granite.attention_scale, granite.residual_multiplier) == (0.1, 0.2)
    assert (granite.embedding_multiplier, granite.logits_divisor) == (12.0, 8.0)
    olmo2 = parse_model_config(_family("olmo2"))
    assert (olmo2.names.attention_norm, olmo2.names.after_mlp_norm) == (None, "post_feedforward_layernorm")
    assert olmo2.query_key_norm == "row"


def test_every_fourth_layer_of_smollm3_has_no_rope() -> None:
    spec = parse_model_config(_family("smollm3", num_hidden_layers=8))
    assert [layer.has_rope for layer in spec.layers] == [True, True, True, False] * 2
    assert [layer.has_rope for layer in parse_model_config(_family("smollm3", no_rope_layers=[0, 1])).layers] == [
        False,
        True,
    ]


def test_rope_order_pairs_a_component_with_the_one_half_a_head_away() -> None:
    rope = parse_model_config(_LLAMA).rope
    assert rope_order(rope, 8) is None
    for is_interleaved, expected in ((False, [0, 1, 4, 5, 2, 3, 6, 7]), (True, [0, 2, 4, 5, 1, 3, 6, 7])):
        part = replace(rope, rotary_dim=4, is_interleaved=is_interleaved)
        order = rope_order(part, 8)
        assert order is not None and order.tolist() == expected
        frequencies, _ = inverse_frequencies(part, 8)
        assert frequencies.tolist() == [*inverse_frequencies(rope, 4)[0].tolist(), 0.0, 0.0]


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rope_spellings(field: str) -> None:
    rope = parse_model_config(_LLAMA | {field: _LLAMA3_ROPE}).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_length) == ("llama3", 500000.0, 8.0, 512)


def test_old_spelling_of_the_rope_type() -> None:
    assert parse_model_config(_LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope.kind == "linear"


def test_yarn_extends_the_length() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert parse_model_config(_QWEN2 | {"rope_scaling": yarn}).max_length == 8192


@pytest.mark.parametrize(
    ("base", "change", "named"),
    [
        (_MISTRAL, {"sliding_window": 512}, "sliding_window=512"),
        (_LLAMA | {"model_type": "mistral", "architectures": None, "max_position_embeddings": 8192}, {}, "window=4096"),
        (_QWEN2, {"use_sliding_window": True, "max_window_layers": 1}, "use_sliding_window"),
        (_QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (_LLAMA, {"sliding_window": 128}, "sliding_window"),
        (_LLAMA, {"kv_lora_rank": 512}, "kv_lora_rank"),
        (_LLAMA, {"num_experts": 8}, "num_experts"),
        (_LLAMA, {"num_local_experts": 8}, "num_local_experts"),
        (_LLAMA, {"attention_sinks": 4}, "attention_sinks"),
        (_LLAMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (_LLAMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (_LLAMA, {"logits_scaling": 8.0}, "logits_scaling"),
        (_LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (_LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (_LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope' without long_factor"),
        (_LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (_LLAMA, {"rope_scaling": {"type": "linear"}}, "without factor"),
        (_LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
        (_LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (_LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (_LLAMA, {"quantization_config": {"quant_method": "fp8", "weight_block_size": []}}, "weight_block_size"),
        (_LLAMA, {"rope_interleaved": True}, "rope_interleaved"),
        (_LLAMA, {"something_new": 0}, "something_new"),
        (_LLAMA, {"model_type": "deepseek_v3"}, "deepseek_v3"),
        (_LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (_LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (_LLAMA, {"hidden_size": None}, "hidden_size"),
        (_LLAMA, {"vocab_size": True}, "vocab_size"),
        (_LLAMA, {"head_dim": 15}, "head_dim"),
        (_QWEN2, {"attention_bias": True}, "attention_bias"),
        (_QWEN3, {"mlp_bias": True}, "mlp_bias"),
        (_QWEN3_MOE, {"num_experts": None}, "num_experts"),
        (_QWEN3_MOE, {"use_sliding_window": True, "max_window_layers": 9}, "use_sliding_window"),
        (_QWEN3_MOE, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (_QWEN3_MOE, {"use_qk_norm": False}, "use_qk_norm"),
        (_QWEN3_MOE, {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        (_LLAMA, {"num_hidden_layers": 10**12}, "num_hidden_layers"),
        (_GLM4_MOE, {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers"),
        (_QWEN3_MOE, {"num_experts_per_tok": 0}, "num_experts_per_tok"),
        (_QWEN3_MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        (_GLM4_MOE, {"n_group": 3}, "3 groups"),
        (_GLM4_MOE, {"topk_group": 5}, "5 of 4 groups"),
        (_GLM4_MOE, {"partial_rotary_factor": 0.3}, "partial_rotary_factor"),
        (_family("olmoe", num_experts=8, num_experts_per_tok=2), {"clip_qkv": 8.0}, "clip_qkv"),
        (_family("phi3"), {"sliding_window": 512}, "sliding_window"),
        (_family("smollm3"), {"no_rope_layers": [1]}, "no_rope_layers"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(base: dict[str, Any], change: dict[str, Any], named: str) -> None:
    with pytest.raises(TandemError, match=named) as caught:
        parse_model_config(base | change)
    assert caught.value.kind is ErrorKind.UNSUPPORTED


@pytest.mark.parametrize(
    "change",
    [
        {"kv_lora_rank": None},
        {"rope_interleaved": False},
        {"some_list": []},
        {"logits_scaling": 1.0},
        {"transformers.js_config": {"dtype": "q4"}},
        {"partial_rotary_factor": 1.0},
        {"use_sliding_window": None},
        {"rope_scaling": None},
        {"max_length": 4096, "max_sequence_length": 2048, "tokenizer_class": "LlamaTokenizer"},
    ],
)
def test_what_is_not_in_use_is_accepted(change: dict[str, Any]) -> None:
    assert parse_model_config(_LLAMA | change) == parse_model_config(_LLAMA)


def test_the_optimizer_of_nvidia_has_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA))
    optimized = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(optimized))
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert read_model_config(tmp_path) == parse_model_config(_LLAMA | {"quantization_config": config})
    for wrong, named in (({"quant_algo": "MXFP8"}, "MXFP8"), (["FP8"], "not an object")):
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": wrong}))
        with pytest.raises(TandemError, match=f"hf_quant_config.json: .*{named}"):
            read_model_config(tmp_path)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match=r"config\.json") as caught:
        read_model_config(tmp_path)
    assert caught.value.kind is ErrorKind.MODEL_NOT_FOUND
    for text in ("{", "[1]", "\udcff", "[" * 5_000, '{"vocab_size": ' + "9" * 5_000 + "}", '{"model_type": {}}'):
        (tmp_path / "config.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(TandemError) as caught:
            read_model_config(tmp_path)
        assert caught.value.kind is ErrorKind.UNSUPPORTED
    for change in ({"rope_theta": "x"}, {"rope_scaling": [1]}, {"eos_token_id": [[]]}, {"eos_token_id": "x"}):
        with pytest.raises(TandemError) as caught:
            parse_model_config(_LLAMA | change)
        assert caught.value.kind is ErrorKind.UNSUPPORTED
    (tmp_path / "config.json").write_text(json.dumps(_LLAMA))
    assert read_model_config(tmp_path) == parse_model_config(_LLAMA)
