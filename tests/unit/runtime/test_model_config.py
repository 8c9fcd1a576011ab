"""Test parsing of model configurations; a field that is in use and not supported is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.model_config import parse_model_config, read_model_config

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
    assert (config.layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.rope.kind, config.rope.theta) == ("default", 500000.0)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert config.eos_token_ids == {2, 3}
    assert config.max_length == 2048


def test_qwen2_has_biases_and_ignores_its_unused_window() -> None:
    config = parse_model_config(
        _QWEN2 | {"use_sliding_window": False, "sliding_window": 1024, "max_window_layers": 1, "eos_token_id": None}
    )
    assert (config.qkv_bias, config.output_bias, config.qk_norm) == (True, False, False)
    assert config.eos_token_ids == frozenset()


def test_qwen3_has_query_and_key_norms_and_free_head_size() -> None:
    config = parse_model_config(_QWEN3 | {"layer_types": ["full_attention"] * 2})
    assert (config.qk_norm, config.head_dim, config.qkv_bias) == (True, 32, False)


def test_mistral_window_that_is_never_reached_is_fine() -> None:
    assert parse_model_config(_MISTRAL | {"sliding_window": 2048}).model_type == "mistral"


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
        (_LLAMA, {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        (_LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (_LLAMA, {"rope_scaling": {"type": "linear"}}, "without factor"),
        (_LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}}, "short_factor"),
        (_LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        (_LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (_LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
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
        {"rope_scaling": None},
    ],
)
def test_what_is_not_in_use_is_accepted(change: dict[str, Any]) -> None:
    assert parse_model_config(_LLAMA | change) == parse_model_config(_LLAMA)


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
