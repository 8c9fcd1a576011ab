"""Read the tensors of a model directory by name, each exactly once.

Files are memory-mapped, so that tensors are read on demand and pages are shared between workers of one machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from tandem.core.errors import ErrorKind, TandemError
from tandem.runtime.architectures.stored_format import AnyMatrix, StoredFormat
from tandem.runtime.matrices import select_columns, select_rows, to_floats
from tandem_kernels.reference.coded import CodedMatrix

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MATRIX_AXES = 2
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def weight_files(directory: Path) -> list[Path]:
    """List the paths of a model directory's safetensors files, sorted by name.

    Raises TandemError if a file is missing, with the names of the missing files, or if the index file cannot be parsed.
    """
    index = directory / INDEX_FILE
    if index.exists():
        names = sorted(set(_weight_map(index).values()))
        files = [directory / name for name in names]
    else:
        files = [directory / SINGLE_FILE]
    missing = [file.name for file in files if file.parent != directory or not os.path.isfile(file)]
    if missing:
        listed = ", ".join(missing)
        problem = f"model directory {directory} has no {listed}: download the model again, or correct model.id"
        raise TandemError(ErrorKind.MODEL_NOT_FOUND, problem, param="model")
    return files


class Checkpoint:
    """Weights in the safetensors files of a model directory, read by tensor name.

    The caller takes every tensor exactly once with `take` or `take_stored` and then calls `finish`, which raises an
    error if a tensor is left over. The object is a context manager that closes the files at exit."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        stored: Sequence[StoredFormat] = (),
    ) -> None:
        """Open the files of `directory`. `take` converts tensors to `dtype` on `device`.

        `stored`: formats of matrices that are not floats. Raises TandemError for a file that is missing or cannot be
        read."""
        self._formats = {suffix: format for format in stored for suffix in format.suffixes[:1]}
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._handles = {}
        self._files: dict[str, str] = {}
        files = weight_files(directory)
        self.num_bytes = sum(file.stat().st_size for file in files)
        for file in files:
            try:
                # Codes are taken apart in host memory.
                place = "cpu" if stored else str(device)
                handle = self._stack.enter_context(safe_open(file, framework="pt", device=place))
            except SafetensorError as error:
                self._stack.close()
                raise _broken(f"{file} cannot be read: {error}") from None
            self._handles.update(dict.fromkeys(handle.keys(), handle))
            self._files.update(dict.fromkeys(handle.keys(), file.name))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Read the tensor `name`, or the given `rows` and `columns` of it, and return it on the checkpoint's device.

        `shape`: expected shape of the whole tensor. `dtype`: dtype of the result, by default the one that the
        checkpoint was opened with. Raises TandemError when the tensor is missing, was taken before, has another shape
        or is not stored in floating point."""
        if self._format_of(name) is not None:
            return to_floats(self.take_stored(name, shape, rows, columns)).to(self._device, dtype or self._dtype)
        if name not in self._handles:
            raise _broken(f"the weights have no tensor {name}, which config.json requires: download the model again")
        handle = self._handles.pop(name)
        found = handle.get_slice(name)
        if tuple(found.get_shape()) != shape:
            stated = f"expected {list(shape)} from config.json"
            raise _broken(f"tensor {name} of {self._files[name]} has shape {list(found.get_shape())}, {stated}")
        is_whole = rows is None and columns is None
        tensor: torch.Tensor = handle.get_tensor(name) if is_whole else _part(found, rows, columns)
        if tensor.dtype not in _FLOATS:
            supported = "supported are float64, float32, bfloat16 and float16"
            raise _broken(f"tensor {name} of {self._files[name]} is stored as {tensor.dtype}; {supported}")
        return tensor.to(self._device, dtype or self._dtype)

    def take_stored(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> AnyMatrix:
        """Read a matrix as `take` does; if the checkpoint stores it in few bits, return it as codes (`CodedMatrix`) in
        host memory.

        Such a matrix is returned as floats in host memory instead if `columns` begin or end within a group of columns
        that share a scale."""
        stored = self._format_of(name)
        if stored is None:
            return self.take(name, shape, rows, columns)
        matrix = self._read_stored(stored, name, shape)
        if rows is not None and len(rows) < shape[0]:
            part = select_rows(matrix, slice(rows.start, rows.stop))
            # A view would keep the whole matrix.
            matrix = part.copy() if isinstance(part, CodedMatrix) else part.clone()
        return matrix if columns is None or len(columns) == shape[1] else select_columns(matrix, columns)

    def _format_of(self, name: str) -> StoredFormat | None:
        base = name.removesuffix(".weight")
        return next((form for mark, form in self._formats.items() if base + mark in self._handles), None)

    def _read_stored(self, stored: StoredFormat, name: str, shape: tuple[int, ...]) -> AnyMatrix:
        """Read a matrix that is stored in the format `stored` into host memory."""
        base = name.removesuffix(".weight")
        missing = [base + suffix for suffix in stored.suffixes if base + suffix not in self._handles]
        if missing:
            raise _broken(f"the weights have no tensor {missing[0]}, which {stored.name} needs")
        if len(shape) != _MATRIX_AXES:
            raise _broken(f"tensor {base}{stored.suffixes[0]} belongs to one of shape {list(shape)}, not to a matrix")
        names = {suffix: base + suffix for suffix in stored.suffixes}
        parts = {suffix: self._handles.pop(part).get_tensor(part).cpu() for suffix, part in names.items()}
        try:
            return stored.read(parts, (shape[0], shape[1]))
        except (ValueError, RuntimeError, IndexError) as error:
            file = self._files[base + stored.suffixes[0]]
            raise _broken(f"the {stored.name} matrix {base} of {file}: {error}") from None

    def drop(self, suffix: str, prefix: str = "") -> None:
        """Ignore the tensors whose names start with `prefix` and end with `suffix`, so that `finish` does not report
        them.

        Tensors that were taken already are not affected. Used for tensors that the model does not need, for example
        because they duplicate another one."""
        self._handles = {
            name: handle
            for name, handle in self._handles.items()
            if not (name.startswith(prefix) and name.endswith(suffix))
        }

    def finish(self) -> None:
        """Check that every tensor was taken or dropped, except biases of zeros, which change nothing: some GPTQ
        checkpoints have one for each matrix.

        Raises TandemError, which names the first tensor that is left over: without this tensor the decoder would
        compute another function than the model."""
        rest = sorted(name for name in self._handles if not self._is_bias_of_zeros(name))
        if rest:
            raise _broken(
                f"the weights have {len(rest)} tensors that this architecture does not use, the first is {rest[0]}"
            )

    def _is_bias_of_zeros(self, name: str) -> bool:
        return name.endswith(".bias") and not bool(self._handles[name].get_tensor(name).any())


def _part(stored: Any, rows: range | None, columns: range | None) -> torch.Tensor:
    """Read the given rows and columns of a tensor in a file, contiguous."""
    index = tuple(slice(None) if part is None else slice(part.start, part.stop) for part in (rows, columns))
    tensor: torch.Tensor = stored[index if columns is not None else index[0]]
    return tensor.contiguous()


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _broken(f"{index} is not an index of weights: {error!r}") from None
    if not all(isinstance(file, str) for file in files.values()):
        raise _broken(f"{index} is not an index of weights: the name of a file is not a text")
    return files


def _broken(what: str) -> TandemError:
    return TandemError(ErrorKind.UNSUPPORTED, what, param="model")
