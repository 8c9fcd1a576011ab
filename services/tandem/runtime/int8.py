"""Round weights to int8, choose the group sizes of their scales, and check whether a model supports int8.

Measured on 6,000 positions of the real model: int8 agreed with float32 on 92.4 % of the greedy tokens with one scale
per output channel, and on 94.4 % (mean KL 0.007) with one scale per 192 components of the layers' channels and per 32
components of the output head's. The head has smaller groups because its errors affect every token.
"""

from __future__ import annotations

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.spec import DecoderSpec, ExpertsMlp
from tandem.runtime.architectures.stored_format import AnyMatrix
from tandem.runtime.matrices import to_floats
from tandem_kernels.reference.coded import CodedMatrix, has_integer_product, round_to_int8
from tandem_kernels.reference.linear_int8 import GROUP, weight_group

_LAYER_GROUP, _HEAD_GROUP = 192, 32


def layer_group(width: int) -> int:
    """Return how many adjacent components of a row of a layer's weight matrix `[n, width]` share one int8 scale."""
    return weight_group(width, _LAYER_GROUP)


def head_group(hidden: int) -> int:
    """Return how many adjacent components of a row of the output head `[vocab, hidden]` share one int8 scale."""
    return weight_group(hidden, _HEAD_GROUP)


def rounded(matrix: AnyMatrix, group: int) -> CodedMatrix:
    """Return a matrix as integers of at most 8 bits, with one scale per `group` adjacent components of a row.

    A matrix that is stored as integers of at most 8 bits is returned unchanged, with its own groups; any other is
    rounded to int8."""
    if isinstance(matrix, CodedMatrix) and has_integer_product(matrix):
        return matrix
    return round_to_int8(to_floats(matrix), group)


def check_int8(config: DecoderSpec, dtype: str) -> None:
    """Check that a model can run with int8 weights.

    Raises TandemError when `dtype` is not float32 or a size in `config` is no multiple of the quantization group."""
    widths = {"hidden": config.hidden_size, "heads": config.heads * config.head_dim}
    widths |= {f"inner of layer {index}": layer.mlp.inner for index, layer in enumerate(config.layers)}
    mixtures = [layer.mlp for layer in config.layers if isinstance(layer.mlp, ExpertsMlp)]
    widths["inner of shared experts"] = max((mlp.shared_inner for mlp in mixtures), default=0)
    reason = None
    if dtype != "float32":
        reason = f"computes in float32, and model.dtype is {dtype}: set --dtype float32"
    for name, width in widths.items():
        if width % GROUP:
            reason = f"needs multiples of {GROUP}, and this model's {name} size is {width}: set --quantization none"
    if reason is not None:
        raise TandemError(ErrorKind.UNSUPPORTED, f"model.quantization=int8 {reason}", param="quantization")
