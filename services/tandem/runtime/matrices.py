"""Select, reorder and join the rows of matrices, whether they are floats or codes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.runtime.architectures.stored_format import AnyMatrix
from tandem_kernels.reference.coded import CodedMatrix, join


def select_rows(matrix: AnyMatrix, index: torch.Tensor | slice) -> AnyMatrix:
    """Return the rows of a matrix, or the components of a vector, that `index` selects."""
    if isinstance(matrix, CodedMatrix):
        return matrix.rows(index)
    return matrix[index if isinstance(index, slice) else index.to(matrix.device)]


def select_columns(matrix: AnyMatrix, part: range) -> AnyMatrix:
    """Return the columns `part` of a matrix, as floats if `part` begins or ends within a group of columns that share a
    scale."""
    selected = matrix.columns(part) if isinstance(matrix, CodedMatrix) else None
    return to_floats(matrix)[:, part.start : part.stop].contiguous() if selected is None else selected


def join_rows(matrices: Sequence[AnyMatrix]) -> AnyMatrix | None:
    """Return one matrix with the rows of all `matrices`, which have equal widths; None if their formats differ."""
    coded = [matrix for matrix in matrices if isinstance(matrix, CodedMatrix)]
    if coded:
        return join(coded) if len(coded) == len(matrices) else None
    return torch.cat([to_floats(matrix) for matrix in matrices])


def join_as_floats(matrices: Sequence[AnyMatrix]) -> AnyMatrix:
    """Return one matrix with the rows of all `matrices`, which have equal widths; as floats if their formats differ.

    Codes are then converted to the dtype and device of the matrices that are floats."""
    joined = join_rows(matrices)
    if joined is not None:
        return joined
    like = next((matrix for matrix in matrices if isinstance(matrix, torch.Tensor)), torch.empty(0))
    return torch.cat([to_floats(matrix).to(like) for matrix in matrices])


def to_floats(matrix: AnyMatrix) -> torch.Tensor:
    """Return a matrix of codes as float32, and a matrix of floats unchanged."""
    return matrix.floats() if isinstance(matrix, CodedMatrix) else matrix
