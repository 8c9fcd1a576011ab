"""The numbers of one step on their way to the device, in one piece of memory and one copy; never decides any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tandem.core.ids import BlockId
from tandem.runtime.batch import Batch, numbers_of
from tandem.runtime.draws import Draws, draws_of
from tandem.runtime.stream import Stream
from tandem.runtime.work import Work
from tandem_kernels.contract import SamplingRows

FIRST_WORDS = 1 << 14
NUM_BUFFERS = 2
"""In host memory: while the device still reads the one of the step before, the next is written."""


@dataclass(frozen=True, slots=True)
class Staged:
    """One step's numbers on the device, until the next step is staged; see `Batch`, `Draws`. `batch` is None where no
    slice is computed. Rows `chained_rows` of its tokens are `chained_draws` of the step before. Digests are of blocks
    `digest_blocks`, the `digest_indices`-th of their prompts. All int64."""

    batch: Batch | None
    draws: Draws
    drawn_rows: torch.Tensor
    picks: torch.Tensor
    host_rows: torch.Tensor
    sampling: SamplingRows
    chained_rows: torch.Tensor
    chained_draws: torch.Tensor
    digest_blocks: torch.Tensor
    digest_indices: torch.Tensor


class Staging:
    """`stage` may be called again once the step staged `NUM_BUFFERS` calls ago has ended."""

    def __init__(self, stream: Stream, block_size: int, num_words: int = FIRST_WORDS) -> None:
        self._stream = stream
        self._block_size = block_size
        self._turn = 0
        self._make(num_words)

    def stage(self, works: Sequence[Work], digests: Sequence[tuple[BlockId, int]]) -> Staged:
        """To be called inside `Stream.running`."""
        pieces = [work.piece for work in works]
        numbers = numbers_of(pieces, [work.tokens for work in works], self._block_size) if works else None
        draws = draws_of(works)
        chained = _chained(works)
        blocks, indices = [int(block) for block, _ in digests], [index for _, index in digests]
        drawn_rows = numbers.drawn_rows if numbers is not None else []
        longs = [numbers.rows if numbers is not None else [], drawn_rows, draws.picks, draws.host_rows, draws.whole]
        longs += [list(chained), list(chained.values()), blocks, indices]
        sequences = numbers.sequences if numbers is not None else []
        device = self._send(longs, draws.real, sequences)
        rows, drawn, picks, host_rows, whole, chained_rows, chained_draws, block_ids, places, real, short = device
        return Staged(
            batch=None if numbers is None else numbers.batch(rows, short),
            draws=draws,
            drawn_rows=drawn,
            picks=picks,
            host_rows=host_rows,
            sampling=_sampling(whole, real),
            chained_rows=chained_rows,
            chained_draws=chained_draws,
            digest_blocks=block_ids,
            digest_indices=places,
        )

    def _send(self, longs: Sequence[list[int]], real: list[float], short: list[int]) -> list[torch.Tensor]:
        """Each list as a tensor on the device: int64, then float64, then int32, all in one copy of 64-bit words."""
        whole = [number for part in longs for number in part]
        stop, end = len(whole) + len(real), len(whole) + len(real) + -(-len(short) // 2)
        if end > len(self._device):
            self._make(2 * end)
        host = self._host[self._turn]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        words = host.numpy()
        words[: len(whole)] = whole
        words[len(whole) : stop].view(np.float64)[:] = real
        words[stop:end].view(np.int32)[: len(short)] = short
        self._device[:end].copy_(host[:end], non_blocking=True)
        parts = list(torch.split(self._device[: len(whole)], [len(part) for part in longs]))
        doubles = self._device[len(whole) : stop].view(torch.float64)
        return [*parts, doubles, self._device[stop:end].view(torch.int32)[: len(short)]]

    def _make(self, num_words: int) -> None:
        self._host = [self._stream.host_words(num_words) for _ in range(NUM_BUFFERS)]
        self._device = torch.empty(num_words, dtype=torch.int64, device=self._stream.device)

    def __repr__(self) -> str:
        return f"Staging({len(self._device)} words on {self._stream.device})"


def _chained(works: Sequence[Work]) -> dict[int, int]:
    """Rows whose ids the step before draws, with the places of those draws."""
    found: dict[int, int] = {}
    row = 0
    for work in works:
        if work.source is not None:
            found[row] = work.source
        row += work.piece.num_tokens
    return found


def _sampling(whole: torch.Tensor, real: torch.Tensor) -> SamplingRows:
    num_draws = len(whole) // 4
    top_k, seed, choice, index = whole.view(4, num_draws)
    temperature, top_p, log_min_p = real.view(3, num_draws)
    return SamplingRows(temperature, top_k, top_p, log_min_p, seed, choice, index)
