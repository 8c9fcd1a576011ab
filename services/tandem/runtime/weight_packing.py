"""Convert a checkpoint into the packed tensors that the compiled CPU kernels read.

Packed tensors are named by layer and part (`layers.3.gate_up`); biases and scales append `.bias` and `.scales`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch

from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.int8 import head_group, layer_group
from tandem.runtime.layer_tensors import Named, drop_unused, read_layer
from tandem_kernels.native.pack import PANEL, gate_up_rows, pack_linear
from tandem_kernels.native.pack_int4 import pack_exact, pack_fours
from tandem_kernels.native.pack_int8 import pack_linear_int8


class Packing(StrEnum):
    """Storage format of weight matrices for the compiled kernels.

    FLOAT: as floats. EXACT: in the fewest bits that represent the values exactly. INT8: in 4 bits where those are
    exact, else rounded to int8; products then round their input rows to int8 too."""

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
            is_matrix = tensor.dim() > 1 and name != "shared_gate"
            if name in ("gate_up", "gate_up.bias", "shared_gate_up"):
                tensor = _interleaved(tensor)
            elif name == "expert_gate_up":
                tensor = torch.cat([_interleaved(expert) for expert in tensor])
            elif name == "expert_down":
                tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -tensor.shape[1] % PANEL)).flatten(0, 1)
            if is_matrix:
                yield from _matrix(f"layers.{i}.{name}", tensor, packing)
            else:
                yield f"layers.{i}.{name}", tensor.flatten()
    yield "norm", checkpoint.take("model.norm.weight", (config.hidden_size,))
    embeddings = checkpoint.take("model.embed_tokens.weight", table)
    head = embeddings
    if config.tied_embeddings:
        checkpoint.drop("lm_head.weight")
    else:
        yield "embeddings", embeddings
        head = checkpoint.take("lm_head.weight", table)
    yield from _matrix("head", head, packing, head_group)


def _interleaved(gate_up: torch.Tensor) -> torch.Tensor:
    """Interleave the rows of gate and up, which are the two halves of a matrix or of its biases."""
    gate, up = gate_up.chunk(2)
    return gate_up_rows(gate.reshape(len(gate), -1), up.reshape(len(up), -1))


def _matrix(name: str, weight: torch.Tensor, packing: Packing, group: Callable[[int], int] = layer_group) -> Named:
    """Yield a packed matrix, and its scales if the format has any.

    `group(width)` is how many components of a channel of that width share a scale when they are rounded to int8."""
    scales = None
    if packing is Packing.INT8:
        fours = pack_fours(weight)
        panels, scales = (fours, None) if fours is not None else pack_linear_int8(weight, group(weight.shape[1]))
    elif packing is Packing.EXACT:
        panels, scales = pack_exact(weight)
    else:
        panels = pack_linear(weight)
    yield name, panels
    if scales is not None:
        yield f"{name}.scales", scales
