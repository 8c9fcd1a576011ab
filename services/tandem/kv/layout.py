"""Define the order of the axes of a KV block and the size of its parts; no other module depends on this order.

A block is one contiguous piece of memory over all layers, heads outermost, so that one block is one transfer descriptor
and a range of heads is a byte range:

    [num_blocks, kv_heads, layers, 2, tile]      (2 = key, value)

A tile is `[block_size, head_dim]` numbers and, where these are float8, `[block_size]` float32 scales after them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
PLANES = 2
SCALED = "float8_e4m3fn"
PROBE_BYTES = 8 << 20
"""Bytes of the probe blocks that are read, and again of those that are written: more than the cache of one core
holds."""
_SCALE_BYTES = 4
_PROBE_BLOCKS = range(2, 257)
"""Allowed numbers of probe blocks: at least two, because neighbours differ in content, and few enough for a short
list."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Hold the shape of the KV of layers that are alike.

    `layers`: number of these layers. `heads`: KV heads of a layer. `head_dim`: numbers in the key, or in the value, of
    one token and head. `dtype`: type of these numbers, a key of `ITEM_BYTES`.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: str

    @property
    def is_scaled(self) -> bool:
        """Return whether the block holds a float32 scale for each token of each head, layer, and key or value, as
        float8 KV does."""
        return self.dtype == SCALED

    def tile_bytes(self, block_size: int) -> int:
        """Return the bytes of one tile: the keys, or the values, of one block for one layer and head."""
        return block_size * (self.head_dim * ITEM_BYTES[self.dtype] + (_SCALE_BYTES if self.is_scaled else 0))

    def head_bytes(self, block_size: int) -> int:
        """Return the bytes that one head takes in one block: keys and values of all layers and all token slots."""
        return self.layers * PLANES * self.tile_bytes(block_size)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Hold the shape of one KV block. `block_size`: tokens of a block. `groups`: one `KVGroup` for each set of layers
    that are alike; exactly one today."""

    block_size: int
    groups: tuple[KVGroup, ...]

    @property
    def group(self) -> KVGroup:
        (only,) = self.groups
        return only

    @property
    def head_bytes(self) -> int:
        """Return the bytes of one head of a block; head h begins `h * head_bytes` after the start of the block."""
        return sum(g.head_bytes(self.block_size) for g in self.groups)

    @property
    def block_bytes(self) -> int:
        return sum(g.heads * g.head_bytes(self.block_size) for g in self.groups)

    def for_rank(self, heads: range) -> KVLayout:
        """Return the layout of one block on a tensor-parallel rank that holds only the KV heads `heads`."""
        return (
            self if len(heads) == self.group.heads else replace(self, groups=(replace(self.group, heads=len(heads)),))
        )

    @property
    def num_probe_blocks(self) -> int:
        """Return the number of blocks of known content that each pool has, so that peers can read them to measure
        bandwidth.

        `KVRegion` says where they are.
        """
        return min(max(PROBE_BYTES // self.block_bytes, _PROBE_BLOCKS.start), _PROBE_BLOCKS.stop - 1)

    @property
    def probe_bytes(self) -> int:
        """Return the bytes of all blocks of a pool that serve bandwidth probes: the blocks that peers read, and as many
        blocks into which the owner's own probes read."""
        return 2 * self.num_probe_blocks * self.block_bytes

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of one block as its executor stores it: `[kv_heads, layers, 2, block_size, head_dim]`, where
        2 stands for key and value.

        A float8 block, which contains scales, is stored as bytes: `[kv_heads, layers, 2, tile_bytes]`, see
        `KVGroup.tile_bytes`.
        """
        g = self.group
        tile = (g.tile_bytes(self.block_size),) if g.is_scaled else (self.block_size, g.head_dim)
        return (g.heads, g.layers, PLANES, *tile)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the layout as a JSON-compatible mapping, the input of `from_dict`."""
        return {"block_size": self.block_size, **asdict(self.group)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> KVLayout:
        """Build a layout from `to_dict` output. Raises KeyError, TypeError or ValueError for anything else."""
        block_size, layers, heads, head_dim = sizes = [fields[n] for n in ("block_size", "layers", "heads", "head_dim")]
        if any(type(size) is not int or size < 1 for size in sizes) or fields["dtype"] not in ITEM_BYTES:
            raise ValueError(f"{dict(fields)} is no layout of KV blocks")
        return cls(block_size, (KVGroup(layers, heads, head_dim, fields["dtype"]),))

    def __str__(self) -> str:
        groups = [f"{g.heads}h x {g.layers}l x 2 x {self.block_size}t x {g.head_dim}d {g.dtype}" for g in self.groups]
        return " + ".join(groups) or "no layers"


@dataclass(frozen=True, slots=True)
class KVRegion:
    """Describe one contiguous KV pool of a rank, registered for transfers: block `b` begins at `address + b *
    block_bytes` of the owner's address space.

    `head_start`, `head_stop`: the range of the model's KV heads that this region holds, `[head_start, head_stop)`; all
    of them without tensor parallelism. `device`: where the memory is, `cpu` or `cuda:N`. `num_probe_blocks`: number of
    blocks behind the first `num_blocks` whose content is the same in every pool and is not written; any worker may read
    them to measure a link. Behind these are as many blocks again, into which the owner's own bandwidth probes read. No
    other block has the content of a probe block.
    """

    address: int
    num_blocks: int
    block_bytes: int
    head_start: int
    head_stop: int
    device: str = "cpu"
    num_probe_blocks: int = 0

    @property
    def num_all_blocks(self) -> int:
        """Count all blocks of the region, including those that only bandwidth probes read and write."""
        return self.num_blocks + 2 * self.num_probe_blocks


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Hold everything besides tokens that the content of a KV block depends on. Workers exchange blocks only if their
    fingerprints have the same `digest`.

    - `weights_digest`, `tokenizer_digest`: digests of the weights and of the tokenizer. `architecture`: digest of what
      config.json says about the computation.
    - `quantization`: how the weights are quantized. `kv_dtype`: type of the numbers in a block, and type of the model's
      computation where that differs. `block_size`: tokens of a block.
    - `arithmetic`: names of GPU, libraries and number of ranks, set only where KV must be equal bit for bit, else
      empty.
    """

    weights_digest: str
    quantization: str
    kv_dtype: str
    architecture: str
    tokenizer_digest: str
    block_size: int
    arithmetic: str = ""

    @property
    def digest(self) -> str:
        *parts, arithmetic = map(str, astuple(self))
        if arithmetic:
            parts.append(arithmetic)
        return hashlib.blake2b("\x1f".join(parts).encode(), digest_size=16).hexdigest()
