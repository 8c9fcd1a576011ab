"""Generate random weights instead of reading them, each a function of seed, tensor name and index.

A weight is the same on every device and for any part of a tensor, because it is computed with integer arithmetic and
one rounded product. A model directory that contains `MARKER` uses random weights in place of a checkpoint, so that the
cost of a model of real size can be measured without its files.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch

from tandem.runtime.checkpoint import Checkpoint
from tandem.runtime.model_config import read_model_config

MARKER = "random_weights.json"
FORMAT = 1
"""Version of the generator. Raise it when the weights of a given seed change."""

_CHUNK = 1 << 24
"""Number of weights generated at once; each takes an intermediate word of 8 bytes."""
_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight", ".w2.weight", "output_linear.weight")
# SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def is_random(directory: Path) -> bool:
    """Return whether a model directory contains a seed for random weights in place of weight files."""
    return (directory / MARKER).is_file()


def random_digest(name: str, seed: int) -> str:
    """Return a hexadecimal digest of a random model's `name` and `seed`.

    It takes the place of the weights digest in the model's fingerprint."""
    return hashlib.blake2b(f"random weights {FORMAT}\0{name}\0{seed}".encode(), digest_size=16).hexdigest()


class RandomWeights:
    """Generates random tensors under the names of a model's weights; used in place of a `Checkpoint`.

    A tensor is a function of `seed`, its name and its shape. Matrices have zero mean and variance `1 / columns`, so
    that activations keep their size. For matrices whose products are added to the residual stream of `layers` layers
    the variance is divided by `2 * layers`, so that the stream does not grow with depth. All elements of vectors, which
    are weights of norms, are 1. `dtype`, `device`: dtype and device of the tensors."""

    def __init__(self, seed: int, layers: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self._layers = layers
        self._dtype = dtype
        self._device = device

    def __enter__(self) -> RandomWeights:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing, because no file is open."""

    def take(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: range | None = None,
        columns: range | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Generate the tensor `name` of shape `shape`, and return the tensor, or the given `rows` and `columns` of it.

        Unlike `Checkpoint.take`, the method may be called again for the same name, and raises nothing."""
        height = range(shape[0]) if rows is None else rows
        if len(shape) == 1:
            return torch.ones(len(height), dtype=dtype or self._dtype, device=self._device)
        matrix = self._generate(name, shape, height, dtype or self._dtype)
        return matrix if columns is None else matrix[:, columns.start : columns.stop].contiguous()

    def take_stored(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """Generate the tensor `name`, as `take` does."""
        return self.take(name, shape, rows, columns)

    def _generate(self, name: str, shape: tuple[int, ...], rows: range, dtype: torch.dtype) -> torch.Tensor:
        """Generate whole rows of a matrix of shape `shape`."""
        variance = 1 / shape[-1]
        if name.endswith(_TO_RESIDUAL):
            variance /= 2 * self._layers
        matrix = torch.empty((len(rows), *shape[1:]), dtype=dtype, device=self._device)
        flat, key, before = matrix.view(-1), _key(self._seed, name), rows.start * math.prod(shape[1:])
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK]
            # A uniform number in (-1, 1) has a variance of 1 / 3.
            part.copy_(_uniform(key, before + start, part.numel(), self._device).mul_(math.sqrt(3 * variance)))
        return matrix

    def drop(self, suffix: str, prefix: str = "") -> None:
        """Do nothing: `Checkpoint.drop` ignores stored tensors, and here none are stored."""

    def finish(self) -> None:
        """Do nothing: `Checkpoint.finish` reports tensors that are left over, and here none are stored."""


WeightSource = Checkpoint | RandomWeights
"""Source of one model's tensors. Call `take` or `take_stored` for each tensor, then `finish`. It is a context manager
that closes its files at the end."""


def open_weights(directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> WeightSource:
    """Open the weights of a model directory, to be read in `dtype` on `device`: random weights where the directory was
    made for them (`is_random`), otherwise its checkpoint.

    Raises TandemError when a file of the checkpoint is missing or cannot be read."""
    if is_random(directory):
        seed = int(json.loads((directory / MARKER).read_text(encoding="ascii"))["seed"])
        return RandomWeights(seed, read_model_config(directory).num_layers, dtype, device)
    return Checkpoint(directory, dtype, device, read_model_config(directory).stored)


def _key(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _uniform(key: int, start: int, count: int, device: torch.device | str) -> torch.Tensor:
    """Generate float32 numbers in (-1, 1) at indices `[start, start + count)`, with 24 random bits each.

    All operations are exact."""
    words = torch.arange(start + 1, start + 1 + count, dtype=torch.int64, device=device)
    words.mul_(_signed(_GOLDEN)).add_(key)
    words.bitwise_xor_(_shifted(words, 30)).mul_(_signed(_MIX1))
    words.bitwise_xor_(_shifted(words, 27)).mul_(_signed(_MIX2))
    words.bitwise_xor_(_shifted(words, 31))
    return _shifted(words, 40).to(torch.float32).sub_(2.0**23).add_(0.5).mul_(2.0**-23)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift words to the right as unsigned numbers."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the signed 64-bit number with the bits of an unsigned one."""
    return word - (1 << 64) if word >> 63 else word
