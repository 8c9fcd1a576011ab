"""Test that mapped tensors are read back as written, each on a page of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.runtime.mmap_tensors import read_tensors, write_tensors


def test_round_trip(tmp_path: Path) -> None:
    written = {
        "a": torch.arange(10, dtype=torch.float32).view(2, 5),
        "b": torch.arange(7, dtype=torch.float16),
        "c": torch.arange(6, dtype=torch.uint8).view(1, 2, 3).transpose(1, 2),
    }
    write_tensors(tmp_path, written.items())
    read = read_tensors(tmp_path)
    assert list(read) == list(written)
    for name, tensor in written.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
        assert read[name].data_ptr() % 4096 == 0, "kernels read whole cache lines"


def test_writing_to_what_was_read_leaves_the_file_alone(tmp_path: Path) -> None:
    write_tensors(tmp_path, [("a", torch.zeros(4))])
    read_tensors(tmp_path)["a"].fill_(1.0)
    assert not read_tensors(tmp_path)["a"].any()


def test_another_type_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, [("a", torch.zeros(4, dtype=torch.float64))])
    with pytest.raises(KeyError):
        read_tensors(tmp_path)
