"""The order of a KV block's axes and the bytes of its parts; nothing else in Tandem knows either.

A block is one contiguous piece of memory over all layers, heads outermost, so that one block is one transfer
descriptor and a range of heads is a byte range:

    [num_blocks, kv_heads, layers, 2, tile]      (2 = key, value)

A tile is `[block_size, head_dim]` numbers and, where these are float8, `[block_size]` float32 scales after them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
PLANES = 2
SCALED = "float8_e4m3fn"
TRIAL_BYTES = 8 << 20
"""Of the trial blocks that are read, and of those that are written: more than a core's own cache holds."""
_SCALE_BYTES = 4
_TRIAL_BLOCKS = range(2, 257)
"""As many of them there may be: neighbours have another content, and a list of them stays short."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV has one shape. `dtype` is a name of `ITEM_BYTES`."""

    layers: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def is_scaled(self) -> bool:
        """Whether each token of a head and plane has a scale in the block."""
        return self.dtype == SCALED

    def tile_bytes(self, block_size: int) -> int:
        """Bytes of one plane of one layer and head of one block."""
        return block_size * (self.head_dim * ITEM_BYTES[self.dtype] + (_SCALE_BYTES if self.is_scaled else 0))

    def head_bytes(self, block_size: int) -> int:
        """Bytes of one head of one block: all layers, both planes, all its token slots."""
        return self.layers * PLANES * self.tile_bytes(block_size)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one block of one worker's pool; today a tuple of exactly one group."""

    block_size: int
    groups: tuple[KVGroup, ...]

    @property
    def group(self) -> KVGroup:
        (only,) = self.groups
        return only

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a block; head h lies at `h * head_bytes`."""
        return sum(g.head_bytes(self.block_size) for g in self.groups)

    @property
    def block_bytes(self) -> int:
        return sum(g.heads * g.head_bytes(self.block_size) for g in self.groups)

    def for_rank(self, heads: range) -> KVLayout:
        """The shape of one block of a rank that holds these of the heads."""
        return (
            self if len(heads) == self.group.heads else replace(self, groups=(replace(self.group, heads=len(heads)),))
        )

    @property
    def num_probe_blocks(self) -> int:
        """How many blocks of known content a pool of this shape has, see `KVRegion`."""
        return min(max(TRIAL_BYTES // self.block_bytes, _TRIAL_BLOCKS.start), _TRIAL_BLOCKS.stop - 1)

    @property
    def trial_bytes(self) -> int:
        """Of those that are read and those that are written."""
        return 2 * self.num_probe_blocks * self.block_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def block_shape(self) -> tuple[int, ...]:
        """`[kv_heads, layers, 2, block_size, head_dim]`: one block as its executor stores it; of bytes, with the tile
        as the last axis, where it is scaled."""
        g = self.group
        tile = (g.tile_bytes(self.block_size),) if g.is_scaled else (self.block_size, g.head_dim)
        return (g.heads, g.layers, PLANES, *tile)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def to_dict(self) -> dict[str, Any]:
        """As a file may hold it."""
        return {"block_size": self.block_size, **asdict(self.group)}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> KVLayout:
        """Raises KeyError, TypeError or ValueError for what is no layout."""
        block_size, layers, heads, head_dim = sizes = [told[n] for n in ("block_size", "layers", "heads", "head_dim")]
        if any(type(size) is not int or size < 1 for size in sizes) or told["dtype"] not in ITEM_BYTES:
            raise ValueError(f"{dict(told)} is no layout of KV blocks")
        return cls(block_size, (KVGroup(layers, heads, head_dim, told["dtype"]),))

    def __str__(self) -> str:
        g = self.group
        return f"{g.heads}h x {g.layers}l x 2 x {self.block_size}t x {g.head_dim}d {g.dtype}"


@dataclass(frozen=True, slots=True)
class KVRegion:
    """One registered pool: block `b` lies at `address + b * block_bytes` of the owner's memory.

    `head_start:head_stop` are the model's KV heads that this region holds (all of them without tensor parallelism).
    Behind its blocks lie `num_probe_blocks` that are the same in every pool and never written, for anybody to read who
    measures a way, and as many that the owner's own trial reads end in; no other block is like them.
    """

    address: int
    num_blocks: int
    block_bytes: int
    head_start: int
    head_stop: int
    device: str = "cpu"
    num_trial_blocks: int = 0

    @property
    def num_all_blocks(self) -> int:
        """With those that only trials read and write."""
        return self.num_blocks + 2 * self.num_trial_blocks


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """All that KV content depends on besides tokens. `arithmetic` says what computes where KV is to be the same to the
    bit, and is empty where it need not be. Partners must agree on `digest` to exchange blocks."""

    weights_digest: str
    quantization: str
    kv_dtype: str
    rope: str
    tokenizer_digest: str
    block_size: int
    arithmetic: str = ""

    @property
    def digest(self) -> str:
        parts = (
            self.weights_digest,
            self.quantization,
            self.kv_dtype,
            self.rope,
            self.tokenizer_digest,
            str(self.block_size),
            *((self.arithmetic,) if self.arithmetic else ()),
        )
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()
