"""Copy all integer and float inputs of a step to the device in one transfer."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from tandem.core.ids import BlockId
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.input_batch import Batch, build_batch_arrays
from tandem.runtime.sampling_plan import SamplingPlan, plan_sampling
from tandem.runtime.slice_work import PreparedSlice
from tandem_kernels.contract import SamplingRows

FIRST_WORDS = 1 << 14
ALIGNMENT = 16
"""Alignment of each list in bytes. Triton compiles a separate variant of a kernel for pointers that are not a multiple
of 16."""
NUM_BUFFERS = 2
"""Host buffers: one is written while the device may still read the previous step's."""


_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Staged:
    """Inputs of one step on the device, valid until the next step is staged.

    Tensors outside `batch` and `sampling` are int64.

    - `batch`: inputs of the forward pass; None if the step has no slices. `sampled_rows`: see `Batch`.
    - `sampling_plan`: which tokens are sampled on the device and which on the host; this value is in host memory.
      `picks`, `host_rows`: see `SamplingPlan`. `sampling`: parameters of the device samples.
    - `chained_rows`: indices of the batch rows whose input token is a sample of the previous step. `chained_samples`:
      for each of these rows, the index of its input token among the previous step's device samples.
    - `digest_blocks`: numbers of the blocks to digest. `digest_indices`: for each of these blocks, its index in its
      prompt."""

    batch: Batch | None
    sampling_plan: SamplingPlan
    sampled_rows: torch.Tensor
    picks: torch.Tensor
    host_rows: torch.Tensor
    sampling: SamplingRows
    chained_rows: torch.Tensor
    chained_samples: torch.Tensor
    digest_blocks: torch.Tensor
    digest_indices: torch.Tensor


class Staging:
    """Sends the inputs of each step to the device in one copy, through its own buffers on the host and on the device.

    Before a step is staged, the step that was staged `NUM_BUFFERS` calls earlier must have finished. Buffers grow as
    needed."""

    def __init__(self, stream: DeviceStream, block_size: int) -> None:
        self._stream = stream
        self._block_size = block_size
        self._turn = 0
        self._make(FIRST_WORDS)

    def stage(self, slices: Sequence[PreparedSlice], digests: Sequence[tuple[BlockId, int]]) -> Staged:
        """Start the copy of a step's inputs to the device and return the device tensors; does not wait for the copy.

        To be called inside `DeviceStream.running`. `digests`: blocks to digest, each with its index in its prompt."""
        pieces = [prepared.piece for prepared in slices]
        arrays = (
            build_batch_arrays(pieces, [prepared.tokens for prepared in slices], self._block_size) if slices else None
        )
        plan = plan_sampling(slices)
        chained = _chained(slices)
        blocks, indices = [int(block) for block, _ in digests], [index for _, index in digests]
        sampled_rows: list[int] = [] if arrays is None else arrays.sampled_rows
        step_lists = (sampled_rows, plan.picks, plan.host_rows, list(chained), list(chained.values()), blocks, indices)
        rows = () if arrays is None else arrays.longs
        longs, real, shorts = self._send(
            (*step_lists, *plan.whole, *rows), plan.real, () if arrays is None else arrays.shorts
        )
        sampled, picks, host_rows, chained_rows, chained_to, block_ids, places, top_k, seed, choice, index = longs[:11]
        return Staged(
            batch=None if arrays is None else arrays.batch(longs[11:], shorts),
            sampling_plan=plan,
            sampled_rows=sampled,
            picks=picks,
            host_rows=host_rows,
            sampling=SamplingRows(real[0], top_k, real[1], real[2], seed, choice, index),
            chained_rows=chained_rows,
            chained_samples=chained_to,
            digest_blocks=block_ids,
            digest_indices=places,
        )

    def _send(
        self, longs: Sequence[list[int]], real: Sequence[list[float]], shorts: Sequence[list[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Copy lists to the device as int64, float64 and int32 tensors, all in one transfer of 64-bit words."""
        whole, doubles, ints = (_padded(longs, 8), _padded(real, 8), _padded(shorts, 4))
        stop, end = len(whole) + len(doubles), len(whole) + len(doubles) + len(ints) // 2
        if end > len(self._device):
            self._make(2 * end)
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        words = host.numpy()
        words[: len(whole)] = whole
        words[len(whole) : stop].view(np.float64)[:] = doubles
        words[stop:end].view(np.int32)[:] = ints
        self._device[:end].copy_(host[:end], non_blocking=True)
        return (
            _parts(self._device[: len(whole)], longs, 8),
            _parts(self._device[len(whole) : stop].view(torch.float64), real, 8),
            _parts(self._device[stop:end].view(torch.int32), shorts, 4),
        )

    def _make(self, num_words: int) -> None:
        self._host = [self._stream.host_words(num_words) for _ in range(NUM_BUFFERS)]
        self._device = torch.empty(num_words, dtype=torch.int64, device=self._stream.device)

    def __repr__(self) -> str:
        return f"Staging({len(self._device)} words on {self._stream.device})"


def _chained(slices: Sequence[PreparedSlice]) -> dict[int, int]:
    """Map each batch row whose input token the previous step samples to the index of that sample."""
    found: dict[int, int] = {}
    row = 0
    for prepared in slices:
        if prepared.source is not None:
            found[row] = prepared.source
        row += prepared.piece.num_tokens
    return found


def _padded(parts: Sequence[list[_Number]], item_bytes: int) -> list[_Number]:
    """Concatenate lists with padding so that each begins at a multiple of `ALIGNMENT`."""
    out: list[_Number] = []
    for part in parts:
        out += part
        out += part[:1] * (-len(part) % (ALIGNMENT // item_bytes)) if part else []
    return out


def _parts(whole: torch.Tensor, parts: Sequence[Sized], item_bytes: int) -> list[torch.Tensor]:
    """Split the concatenation of `_padded` into views of the original lists, without the padding."""
    per = ALIGNMENT // item_bytes
    out, start = [], 0
    for part in parts:
        out.append(whole[start : start + len(part)])
        start += -(-len(part) // per) * per
    return out
