"""The numbers of one step on their way to the device, in one piece of memory and one copy; never decides any."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from tandem.core.ids import BlockId
from tandem.runtime.device_stream import DeviceStream
from tandem.runtime.input_batch import Batch, numbers_of
from tandem.runtime.sampling_plan import SamplingPlan, draws_of
from tandem.runtime.slice_work import PreparedSlice
from tandem_kernels.contract import SamplingRows

FIRST_WORDS = 1 << 14
ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that are no multiple of it."""
NUM_BUFFERS = 2
"""In host memory: while the device still reads the one of the step before, the next is written."""


_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Staged:
    """One step's numbers on the device, until the next step is staged; see `Batch`, `SamplingPlan`. `batch` is None
    where no slice is computed. Rows `chained_rows` of its tokens are `chained_draws` of the step before. Digests are of
    blocks `digest_blocks`, the `digest_indices`-th of their prompts. All int64."""

    batch: Batch | None
    draws: SamplingPlan
    sampled_rows: torch.Tensor
    picks: torch.Tensor
    host_rows: torch.Tensor
    sampling: SamplingRows
    chained_rows: torch.Tensor
    chained_draws: torch.Tensor
    digest_blocks: torch.Tensor
    digest_indices: torch.Tensor


class Staging:
    """`stage` may be called again once the step staged `NUM_BUFFERS` calls ago has ended."""

    def __init__(self, stream: DeviceStream, block_size: int, num_words: int = FIRST_WORDS) -> None:
        self._stream = stream
        self._block_size = block_size
        self._turn = 0
        self._make(num_words)

    def stage(self, works: Sequence[PreparedSlice], digests: Sequence[tuple[BlockId, int]]) -> Staged:
        """To be called inside `DeviceStream.running`."""
        pieces = [work.piece for work in works]
        numbers = numbers_of(pieces, [work.tokens for work in works], self._block_size) if works else None
        draws = draws_of(works)
        chained = _chained(works)
        blocks, indices = [int(block) for block, _ in digests], [index for _, index in digests]
        sampled_rows: list[int] = [] if numbers is None else numbers.sampled_rows
        own = (sampled_rows, draws.picks, draws.host_rows, list(chained), list(chained.values()), blocks, indices)
        rows = () if numbers is None else numbers.longs
        longs, real, shorts = self._send(
            (*own, *draws.whole, *rows), draws.real, () if numbers is None else numbers.shorts
        )
        drawn, picks, host_rows, chained_rows, chained_draws, block_ids, places, top_k, seed, choice, index = longs[:11]
        return Staged(
            batch=None if numbers is None else numbers.batch(longs[11:], shorts),
            draws=draws,
            sampled_rows=drawn,
            picks=picks,
            host_rows=host_rows,
            sampling=SamplingRows(real[0], top_k, real[1], real[2], seed, choice, index),
            chained_rows=chained_rows,
            chained_draws=chained_draws,
            digest_blocks=block_ids,
            digest_indices=places,
        )

    def _send(
        self, longs: Sequence[list[int]], real: Sequence[list[float]], shorts: Sequence[list[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Each list as a tensor on the device, int64, float64 and int32, all in one copy of 64-bit words."""
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


def _chained(works: Sequence[PreparedSlice]) -> dict[int, int]:
    """Rows whose ids the step before draws, with the places of those draws."""
    found: dict[int, int] = {}
    row = 0
    for work in works:
        if work.source is not None:
            found[row] = work.source
        row += work.piece.num_tokens
    return found


def _padded(parts: Sequence[list[_Number]], item_bytes: int) -> list[_Number]:
    """One after the other, so that each begins at a multiple of `ALIGNMENT`."""
    out: list[_Number] = []
    for part in parts:
        out += part
        out += part[:1] * (-len(part) % (ALIGNMENT // item_bytes)) if part else []
    return out


def _parts(whole: torch.Tensor, parts: Sequence[Sized], item_bytes: int) -> list[torch.Tensor]:
    """What `_padded` put together, as views without what pads them."""
    per = ALIGNMENT // item_bytes
    out, start = [], 0
    for part in parts:
        out.append(whole[start : start + len(part)])
        start += -(-len(part) // per) * per
    return out
