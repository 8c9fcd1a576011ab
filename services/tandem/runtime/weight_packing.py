"""Convert a checkpoint into the packed tensors that the compiled CPU kernels read.

Packed tensors are named by layer and part (`layers.3.gate_up`); biases append `.bias`, the parts of scales
`.scales.0` and so on, and the format of codes `.format`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from enum import StrEnum

import torch

from tandem.runtime.architectures.spec import DecoderSpec, ExpertsMlp
from tandem.runtime.architectures.stored_format import AnyMatrix
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.int8 import head_group, layer_group, rounded
from tandem.runtime.layer_tensors import Named, drop_unused, read_layer
from tandem.runtime.matrices import select_rows, to_floats
from tandem_kernels.native.pack import PANEL, gate_up_rows, pack_linear
from tandem_kernels.native.pack_codes import PackedMatrix, pack_coded, pack_exact


class Packing(StrEnum):
    """Storage format of weight matrices for the compiled kernels.

    - FLOAT: float32.
    - EXACT: without rounding. Codes of the checkpoint stay codes; a matrix of floats becomes bfloat16 if bfloat16 holds
      all its elements exactly, else float32.
    - INT8: integers of at most 8 bits. A matrix that the checkpoint stores as such integers is unchanged, any other is
      rounded to int8. Products then round their input rows to int8 too."""

    FLOAT = "float"
    EXACT = "exact"
    INT8 = "int8"


def pack(config: DecoderSpec, checkpoint: Checkpoint, packing: Packing) -> Named:
    """Yield all packed tensors of a model as (name, tensor).

    Each tensor is taken from the checkpoint when the iterator reaches it. Raises TandemError when a tensor is missing
    or of the wrong shape.
    """
    table = (config.vocab_size, config.hidden_size)
    drop_unused(config, checkpoint)
    for i in range(config.num_layers):
        for name, tensor in read_layer(config, checkpoint, i):
            is_matrix = len(tensor.shape) > 1 and name != "shared_gate"
            if name in ("gate_up", "gate_up.bias", "shared_gate_up"):
                tensor = select_rows(tensor, _interleaved(tensor.shape[0], 1))
            elif name == "expert_gate_up":
                tensor = select_rows(tensor, _interleaved(tensor.shape[0], _experts(config, i)))
            elif name == "expert_down":
                tensor = select_rows(tensor, _padded(config.hidden_size, _experts(config, i)))
            if is_matrix:
                yield from _matrix(f"layers.{i}.{name}", tensor, Packing.EXACT if name == "router" else packing)
            else:
                yield f"layers.{i}.{name}", to_floats(tensor).flatten()
    yield "norm", checkpoint.take("model.norm.weight", (config.hidden_size,))
    embeddings = checkpoint.take_stored("model.embed_tokens.weight", table)
    head = embeddings
    if config.tied_embeddings:
        checkpoint.drop("lm_head.weight")
    else:
        yield from _matrix("embeddings", embeddings, Packing.EXACT)
        head = checkpoint.take_stored("lm_head.weight", table)
    yield from _matrix("head", head, packing, head_group)


def _experts(config: DecoderSpec, layer: int) -> int:
    mlp = config.layers[layer].mlp
    assert isinstance(mlp, ExpertsMlp)
    return mlp.count


def _interleaved(num_rows: int, num_experts: int) -> torch.Tensor:
    """Return the order of rows in which those of gate and up of each expert are interleaved."""
    rows = torch.arange(num_rows).view(num_experts, 2, -1)
    return torch.cat([gate_up_rows(gate[:, None], up[:, None]).flatten() for gate, up in rows])


def _padded(num_rows: int, num_experts: int) -> torch.Tensor:
    """Return the order of rows in which the rows of each expert are followed by copies of its last row, up to whole
    panels."""
    places = torch.arange(-(-num_rows // PANEL) * PANEL).clamp(max=num_rows - 1)
    return (torch.arange(num_experts)[:, None] * num_rows + places).flatten()


def _matrix(name: str, weight: AnyMatrix, packing: Packing, group: Callable[[int], int] = layer_group) -> Named:
    """Yield a packed matrix and its scales.

    `group(width)` is how many components of a channel of that width share a scale when they are rounded to int8."""
    packed = _packed(weight, packing, group)
    yield name, packed.panels
    for number, part in enumerate(packed.scales):
        yield f"{name}.scales.{number}", part
    if packed.format is not None:
        yield f"{name}.format", torch.tensor(astuple(packed.format), dtype=torch.int32)


def _packed(weight: AnyMatrix, packing: Packing, group: Callable[[int], int]) -> PackedMatrix:
    if packing is Packing.EXACT:
        return pack_exact(weight)
    if packing is Packing.FLOAT:
        return PackedMatrix(pack_linear(to_floats(weight)))
    return pack_coded(rounded(weight, group(weight.shape[1])))
