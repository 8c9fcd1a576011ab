"""Test the conversion of a GGUF file to a model directory; unknown parts are refused by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, RopeScalingType, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime import gguf
from tandem.runtime.checkpoint import Checkpoint, weight_files
from tandem.runtime.gguf import convert
from tandem.runtime.model_config import parse_model_config, read_model_config
from tandem.runtime.model_store import resolve_model
from tandem.runtime.rope_frequencies import inverse_frequencies
from tests.unit.runtime.conftest import tensors

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
}
_HEADS = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}
_SPECIAL = ["<|start|>", "<|end|>"]
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_MERGES = [("a", "b"), ("1", "2"), ("Ġ", "a")]

Edit = Callable[[GGUFWriter], object]


def _permuted(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Permute query and key rows as llama.cpp's converter does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write(path: Path, edit: Edit = lambda w: None, *, pre: str = "smollm", tied: bool = False) -> Path:
    writer = GGUFWriter(path, "llama")
    if "blockless" not in path.name:
        writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(8)
    tokens = _SPECIAL + _BYTES + ["".join(pair) for pair in _MERGES]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(_SPECIAL) + [1] * (len(tokens) - len(_SPECIAL)))
    writer.add_token_merges([" ".join(pair) for pair in _MERGES])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    edit(writer)
    for name, tensor in _weights(len(tokens)).items():
        if tied and name.startswith("lm_head"):
            continue
        values = tensor.numpy()
        for part, heads in _HEADS.items():
            values = _permuted(values, heads) if part in name else values
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        if "ffn_up" in name:
            writer.add_tensor(name, quantize(values, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(vocab: int) -> dict[str, torch.Tensor]:
    table = torch.randn((vocab, 32), generator=torch.Generator().manual_seed(4))
    return tensors() | {"model.embed_tokens.weight": table, "lm_head.weight": table + 1}


def _convert(source: Path) -> Path:
    target = source.with_suffix("")
    target.mkdir()
    convert(source, target, lambda text: None)
    return target


def test_weights_are_read_back_unchanged(tmp_path: Path) -> None:
    target = _convert(_write(tmp_path / "m.gguf"))
    expected = _weights(len(_SPECIAL) + len(_BYTES) + len(_MERGES))
    with Checkpoint(target, torch.float32, stored=read_model_config(target).stored) as checkpoint:
        for name, tensor in expected.items():
            tolerance = 1e-2 if "up_proj" in name else 0
            torch.testing.assert_close(checkpoint.take(name, tuple(tensor.shape)), tensor, atol=tolerance, rtol=0)
        checkpoint.finish()


def test_blocks_stay_as_they_are(tmp_path: Path) -> None:
    source = _write(tmp_path / "m.gguf")
    stored = load_file(_convert(source) / "model.safetensors")["model.layers.1.mlp.up_proj.weight_q8_0"]
    blocks = next(tensor.data for tensor in GGUFReader(source).tensors if tensor.name == "blk.1.ffn_up.weight")
    assert stored.dtype == torch.uint8 and np.array_equal(stored.numpy(), blocks)


def test_a_large_file_becomes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "_SHARD_BYTES", 10_000)
    target = _convert(_write(tmp_path / "m.gguf"))
    assert len(weight_files(target)) > 1 and not (target / "model.safetensors").exists()
    config = read_model_config(target)
    with Checkpoint(target, torch.float32, stored=config.stored) as checkpoint:
        table = checkpoint.take("model.embed_tokens.weight", (config.vocab_size, 32))
    assert torch.equal(table, _weights(config.vocab_size)["model.embed_tokens.weight"])


def test_configuration(tmp_path: Path) -> None:
    config = read_model_config(_convert(_write(tmp_path / "m.gguf")))
    assert (config.num_layers, config.heads, config.kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert (config.rms_norm_eps, config.rope.theta, config.max_length) == (1e-5, 100000.0, 128)
    assert (config.eos_token_ids, config.bos_token_id, config.tied_embeddings) == (frozenset({1}), 0, False)


def test_without_an_output_matrix_embeddings_are_tied(tmp_path: Path) -> None:
    assert read_model_config(_convert(_write(tmp_path / "m.gguf", tied=True))).tied_embeddings


def test_all_tokens_that_end_a_turn_are_ends(tmp_path: Path) -> None:
    target = _convert(_write(tmp_path / "m.gguf", lambda w: w.add_eot_token_id(0)))
    assert read_model_config(target).eos_token_ids == {0, 1}


def test_llama3_frequencies_are_recognised(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 100000.0}
    base = json.loads((_convert(_write(tmp_path / "plain.gguf")) / "config.json").read_text())
    expected = parse_model_config(base | {"rope_parameters": rope})
    scaled, _ = inverse_frequencies(expected.rope, 8)
    plain, _ = inverse_frequencies(parse_model_config(base).rope, 8)
    factors = (plain / scaled).numpy()
    target = _convert(_write(tmp_path / "m.gguf", lambda w: w.add_tensor("rope_freqs.weight", factors)))
    assert read_model_config(target).rope == expected.rope
    with pytest.raises(TandemError, match="rope_freqs"):
        _convert(_write(tmp_path / "odd.gguf", lambda w: w.add_tensor("rope_freqs.weight", factors * 1.1)))


def test_tokenizer(tmp_path: Path) -> None:
    target = _convert(_write(tmp_path / "m.gguf"))
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert tokenizer.encode("ab<|end|>").ids == [tokenizer.token_to_id("ab"), 1]
    assert "12" not in tokenizer.encode("12").tokens, "digits stay apart"
    assert tokenizer.encode(" ab é\n").ids
    assert tokenizer.decode(tokenizer.encode(" ab é\n 日本").ids) == " ab é\n 日本"
    settings = json.loads((target / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"], settings["add_bos_token"]) == ("<|start|>", "<|end|>", False)
    assert (target / "chat_template.jinja").read_text() == "{{ messages[0]['content'] }}"


def test_bos_is_added_where_the_file_sets_it(tmp_path: Path) -> None:
    for pre, edit, adds in (
        ("smollm", lambda w: w.add_add_bos_token(True), True),
        ("llama-bpe", lambda w: None, True),
        ("llama-bpe", lambda w: w.add_add_bos_token(False), False),
        ("qwen2", lambda w: None, False),
    ):
        path = tmp_path / f"{pre}-{adds}-{len(list(tmp_path.iterdir()))}.gguf"
        tokenizer = Tokenizer.from_file(str(_convert(_write(path, edit, pre=pre)) / "tokenizer.json"))
        assert (tokenizer.encode("a").ids[0] == 0) is adds, pre


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda w: w.add_expert_count(8), "expert_count"),
        (lambda w: w.add_sliding_window(64), "sliding_window"),
        (lambda w: w.add_rope_scaling_type(RopeScalingType.LONGROPE), "longrope"),
        (lambda w: w.add_key_length(16), "dimension_count=8"),
        (lambda w: w.add_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 2), np.float32)), "ffn_gate_exps"),
        (lambda w: w.add_add_eos_token(True), "end of text"),
        (lambda w: w.add_uint16("split.count", 2), "one of 2 files"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(tmp_path: Path, edit: Edit, named: str) -> None:
    with pytest.raises(TandemError, match=named) as caught:
        _convert(_write(tmp_path / "m.gguf", edit))
    assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_unknown_pre_tokenizer_and_broken_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TandemError, match="'poro'"):
        _convert(_write(tmp_path / "poro.gguf", pre="poro"))
    named = _write(tmp_path / "m.gguf").read_bytes()
    (tmp_path / "nameless.gguf").write_bytes(named.replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.was"))
    with pytest.raises(TandemError, match=r"lacks the key 'tokenizer\.ggml\.pre'"):
        _convert(tmp_path / "nameless.gguf")
    with pytest.raises(TandemError, match="num_hidden_layers"):
        _convert(_write(tmp_path / "blockless.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nonsense")
    with pytest.raises(TandemError, match="not a readable GGUF"):
        _convert(tmp_path / "broken.gguf")


def test_a_file_with_a_damaged_part_is_refused(tmp_path: Path) -> None:
    """A key twice, a text that is not UTF-8, and a token id beyond the vocabulary."""
    whole = _write(tmp_path / "m.gguf").read_bytes()
    damage = {
        "twice": whole.replace(b"llama.rope.freq_base", b"llama.context_length"),
        "text": whole.replace(b"smollm", b"\xff" * 6),
        "id": whole.replace(b"bos_token_id\4" + bytes(7), b"bos_token_id\4" + bytes(3) + b"\xff" * 4),
    }
    for name, data in damage.items():
        assert data != whole
        (tmp_path / f"{name}.gguf").write_bytes(data)
        with pytest.raises(TandemError) as caught:
            _convert(tmp_path / f"{name}.gguf")
        assert caught.value.kind is ErrorKind.UNSUPPORTED


def test_a_list_that_is_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    """A file of 45 bytes announces 2**48 numbers."""
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    (tmp_path / "m.gguf").write_bytes(head + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**48))
    with pytest.raises(TandemError, match="it ends within the value"):
        _convert(tmp_path / "m.gguf")


def test_a_file_is_imported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = _write(tmp_path / "m.gguf")
    directory = resolve_model(str(source), tmp_path / "cache")
    assert "importing m" in capsys.readouterr().err
    assert (directory / "weights.digest").read_text()
    before = (directory / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(source), tmp_path / "cache") == directory
    assert (directory / "model.safetensors").stat().st_mtime_ns == before
    assert capsys.readouterr().err == ""


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    source = _write(tmp_path / "m.gguf", pre="poro")
    with pytest.raises(TandemError):
        resolve_model(str(source), tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").iterdir() if p.is_dir()] == []
