"""Write GGUF files for measurements.

    python write_gguf.py convert SOURCE.gguf TARGET.gguf TYPE
    python write_gguf.py experts SOURCE.gguf TARGET.gguf TYPE

`convert` rewrites a file with all matrices in TYPE (F32, Q8_0, Q4_K, ...); the values that F32 holds are those that
Tandem's own import of the file has. `experts` writes a Qwen3-MoE of about 0.9 billion random weights, 64 experts of
which a token uses 8, with the tokenizer of SOURCE. Rows that are no whole blocks of a K type are in Q5_0, as in
llama.cpp's own files.

Runs in a peer's environment, so it imports nothing of Tandem. ggml's own quantisers are called.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

_UNKNOWN_FILE_TYPE = 1024
"""The value of `general.file_type` for a file of no common mixture."""
_LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM = 8, 1024, 16, 4, 64
_EXPERTS, _USED, _INNER = 64, 8, 512

Tensors = Iterator[tuple[str, np.ndarray[Any, Any]]]


class _Quantiser:
    """ggml's quantisers, from the library of the package xllamacpp."""

    def __init__(self) -> None:
        import xllamacpp

        (library,) = Path(xllamacpp.__file__).parent.glob("xllamacpp*.so")
        self._quantise = ctypes.CDLL(str(library)).ggml_quantize_chunk
        self._quantise.restype = ctypes.c_size_t
        rows = (ctypes.c_int64,) * 3
        self._quantise.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *rows, ctypes.c_void_p)

    def __call__(self, values: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
        size, num_bytes = GGML_QUANT_SIZES[kind]
        width, source = values.shape[-1], np.ascontiguousarray(values, dtype=np.float32)
        out = np.empty((*values.shape[:-1], width // size * num_bytes), dtype=np.uint8)
        self._quantise(int(kind), source.ctypes.data, out.ctypes.data, 0, source.size // width, width, None)
        return out


def convert(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Rewrite a file with all matrices in one type."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    _copy_fields(reader, writer, "")
    _write(writer, _values(reader), kind)


def experts(source: Path, target: Path, kind: GGMLQuantizationType) -> None:
    """Write a random model with experts and the tokenizer of another file."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "qwen3moe")
    _copy_fields(reader, writer, "tokenizer.")
    writer.add_block_count(_LAYERS)
    writer.add_context_length(4096)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD_DIM)
    writer.add_value_length(_HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(_USED)
    writer.add_expert_feed_forward_length(_INNER)
    _write(writer, _random(len(reader.fields["tokenizer.ggml.tokens"].contents())), kind)


def _copy_fields(reader: GGUFReader, writer: GGUFWriter, prefix: str) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or not name.startswith(prefix):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is GGUFValueType.ARRAY else None
        value = _UNKNOWN_FILE_TYPE if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, kind, sub_type=inner)


def _values(reader: GGUFReader) -> Tensors:
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
        # `shape` has the fastest axis first; what is written has it last.
        yield tensor.name, values.reshape(tuple(int(length) for length in reversed(tensor.shape)))


def _random(vocab: int) -> Tensors:
    source = np.random.default_rng(1)

    def matrix(*shape: int) -> np.ndarray[Any, Any]:
        return source.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5)

    yield "token_embd.weight", matrix(vocab, _HIDDEN)
    yield "output_norm.weight", np.ones(_HIDDEN, np.float32)
    for layer in range(_LAYERS):
        prefix = f"blk.{layer}."
        for name, width in (("attn_norm", _HIDDEN), ("ffn_norm", _HIDDEN)):
            yield f"{prefix}{name}.weight", np.ones(width, np.float32)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield f"{prefix}{name}.weight", np.ones(_HEAD_DIM, np.float32)
        yield f"{prefix}attn_q.weight", matrix(_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{prefix}attn_k.weight", matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{prefix}attn_v.weight", matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN)
        yield f"{prefix}attn_output.weight", matrix(_HIDDEN, _HEADS * _HEAD_DIM)
        yield f"{prefix}ffn_gate_inp.weight", matrix(_EXPERTS, _HIDDEN)
        yield f"{prefix}ffn_gate_exps.weight", matrix(_EXPERTS, _INNER, _HIDDEN)
        yield f"{prefix}ffn_up_exps.weight", matrix(_EXPERTS, _INNER, _HIDDEN)
        yield f"{prefix}ffn_down_exps.weight", matrix(_EXPERTS, _HIDDEN, _INNER)


def _write(writer: GGUFWriter, tensors: Tensors, kind: GGMLQuantizationType) -> None:
    quantise = _Quantiser()
    for name, values in tensors:
        if kind is GGMLQuantizationType.F32 or values.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values, raw_dtype=GGMLQuantizationType.F32)
            continue
        chosen = kind if values.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0 else GGMLQuantizationType.Q5_0
        writer.add_tensor(name, quantise(values, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    command, source, target, name = sys.argv[1:]
    partial = Path(target).with_suffix(".partial")
    {"convert": convert, "experts": experts}[command](Path(source), partial, GGMLQuantizationType[name])
    partial.rename(target)
