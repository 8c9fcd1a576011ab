"""Weights that are drawn instead of read, each number a function of seed, tensor and place; never on disk, never text.

The same on every device, and for any part of a tensor, because nothing but integer arithmetic and one rounded product
makes them. Where a model directory says so they stand in for its checkpoint, so that what a model of real sizes
costs can be measured without its files.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from types import TracebackType

import torch

from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.model_config import read_model_config
from tandem.runtime.weight_source import WeightSource

MARKER = "random_weights.json"
FORMAT = 1
"""Counts the ways of drawing: with another one the weights of a seed are others."""

_CHUNK = 1 << 24
"""Numbers that are drawn at once; intermediate words have 8 bytes each."""
_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")
# SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def is_random(directory: Path) -> bool:
    """Whether a model directory has no weights but a seed."""
    return (directory / MARKER).is_file()


def open_weights(directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> WeightSource:
    """The weights of a model directory, on `device`. Raises TandemError when they cannot be read."""
    if is_random(directory):
        seed = int(json.loads((directory / MARKER).read_text(encoding="ascii"))["seed"])
        return RandomWeights(seed, read_model_config(directory).layers, dtype, device)
    return Checkpoint(directory, dtype, device)


def random_digest(name: str, seed: int) -> str:
    """What stands for the weights in a fingerprint."""
    return hashlib.blake2b(f"random weights {FORMAT}\0{name}\0{seed}".encode(), digest_size=16).hexdigest()


class RandomWeights:
    """A `WeightSource` that has every tensor that it is asked for.

    Matrices have zero mean and variance `1 / columns`, so that activations keep their size; those that add to the
    residual stream of `layers` layers, a `1 / (2 * layers)` of it, so that the stream does not grow with depth.
    Vectors, which are norms, are ones.
    """

    def __init__(self, seed: int, layers: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self._layers = layers
        self._dtype = dtype
        self._device = device

    def __enter__(self) -> RandomWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""

    def take(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """The tensor `name`, drawn anew at each call, or these parts of it: whole rows, of which columns are kept."""
        height = range(shape[0]) if rows is None else rows
        if len(shape) == 1:
            return torch.ones(len(height), dtype=self._dtype, device=self._device)
        drawn = self._draw(name, shape, height)
        return drawn if columns is None else drawn[:, columns.start : columns.stop].contiguous()

    def _draw(self, name: str, shape: tuple[int, ...], rows: range) -> torch.Tensor:
        variance = 1 / shape[-1]
        if name.endswith(_TO_RESIDUAL):
            variance /= 2 * self._layers
        drawn = torch.empty((len(rows), shape[1]), dtype=self._dtype, device=self._device)
        flat, key, before = drawn.view(-1), _key(self._seed, name), rows.start * shape[1]
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            # A uniform number in (-1, 1) has a variance of 1 / 3.
            part.copy_(_uniform(key, before + start, part.numel(), self._device).mul_(math.sqrt(3 * variance)))
        return drawn

    def drop(self, suffix: str) -> None:
        """Nothing is there to be forgotten."""

    def finish(self) -> None:
        """Nothing is left over."""


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _uniform(key: int, start: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Float32 numbers in (-1, 1) of places `[start, start + count)`, with 24 random bits each; all steps are exact."""
    words = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    words.mul_(_signed(_GOLDEN)).add_(key)
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(_MIX1))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(_MIX2))
    words.bitwise_xor_(_shifted(words, 31))
    return _shifted(words, 40).to(torch.float32).sub_(2.0**23).add_(0.5).mul_(2.0**-23)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, as if words had no sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
