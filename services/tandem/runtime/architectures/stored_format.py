"""Read from config.json how a checkpoint stores its matrices, and restore their values.

Supported are float8 weights (e4m3) with scales: `quant_method` "fp8", with one per block, as DeepSeek, Qwen and GLM
publish it, and "compressed-tensors" in the format "float-quantized", with one per row or matrix. Values are restored
when the weights are read. Activations are not rounded, whatever the file asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tandem.runtime.architectures.refusal import Json, unsupported

_READ = frozenset({"quant_method", "fmt", "weight_block_size", "format", "config_groups", "kv_cache_scheme"})
# Which modules have scales is seen by their tensors; activations are not rounded.
_HARMLESS = frozenset(
    {
        "activation_scheme",
        "global_compression_ratio",
        "ignore",
        "ignored_layers",
        "modules_to_not_convert",
        "quantization_status",
        "version",
    }
)
_FP8_FORMATS = ("float", "float8_e4m3fn", "e4m3", None)


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """Format of a checkpoint's matrices.

    `name`: of the format, for messages. `scale`: what follows a matrix's name in that of its scales. `block`: rows and
    columns that share a scale; None: each row has one, or the whole matrix."""

    name: str
    scale: str
    block: tuple[int, int] | None = None

    def restore(self, stored: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values `[n, k]` of float8 numbers `stored` in `dtype`; products with scales are float32.

        Raises ValueError when the scales have another shape than the format asks for."""
        if stored.dim() != 2:
            raise ValueError(f"a tensor of shape {list(stored.shape)} has scales, and only matrices may have them")
        n, k = stored.shape
        values, scale = stored.to(torch.float32), scale.to(torch.float32)
        if self.block is None:
            if scale.numel() not in (1, n):
                raise ValueError(f"scales of shape {list(scale.shape)} for a matrix of {list(stored.shape)}")
            return (values * scale.view(-1, 1)).to(dtype)
        rows, columns = self.block
        if tuple(scale.shape) != (-(-n // rows), -(-k // columns)):
            raise ValueError(f"scales of shape {list(scale.shape)} for a matrix of {list(stored.shape)}")
        whole = scale.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        return values.mul_(whole).to(dtype)


def read_stored_format(config: Json | None) -> StoredFormat | None:
    """Return the format that a `quantization_config` describes; None without one. Raises TandemError, which names what
    is not supported."""
    if not config:
        return None
    readers = {"fp8": _fp8, "compressed-tensors": _compressed_tensors}
    method = config.get("quant_method")
    if method not in readers:
        raise unsupported(f"quantization_config with quant_method={method!r} (known: {', '.join(readers)})")
    for name, value in config.items():
        if value and name not in _READ and name not in _HARMLESS:
            raise unsupported(f"quantization_config with {name}={value!r}")
    return readers[method](config)


def _fp8(config: Json) -> StoredFormat:
    kind, block = config.get("fmt"), config.get("weight_block_size")
    if kind not in _FP8_FORMATS:
        raise unsupported(f"quantization_config with fmt={kind!r}")
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
        raise unsupported(f"quantization_config with weight_block_size={block!r}")
    return StoredFormat("fp8", "_scale_inv", (block[0], block[1]))


def _compressed_tensors(config: Json) -> StoredFormat:
    if (name := config.get("format")) != "float-quantized":
        raise unsupported(f"quantization_config with format={name!r} (known: float-quantized)")
    if config.get("kv_cache_scheme"):
        raise unsupported("quantization_config with a kv_cache_scheme")
    groups = config.get("config_groups") or {}
    for group in groups.values():
        _check_weights(group.get("weights") or {})
    if not groups:
        raise unsupported("quantization_config without config_groups")
    return StoredFormat("compressed-tensors float-quantized", "_scale")


def _check_weights(weights: dict[str, Any]) -> None:
    """Raise TandemError unless weights are symmetric float8 numbers with a scale per row or matrix."""
    expected = {"num_bits": 8, "type": "float", "symmetric": True}
    for name, value in expected.items():
        if weights.get(name) != value:
            raise unsupported(f"quantization_config with weights of {name}={weights.get(name)!r}")
    if weights.get("strategy") not in ("channel", "tensor"):
        raise unsupported(f"quantization_config with weights of strategy={weights.get('strategy')!r}")
