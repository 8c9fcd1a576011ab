"""Define the model shapes and sizes that the bench measures."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model that its kernels depend on.

    `heads`, `kv_heads`: number of query and of KV heads. `hidden`: width of a row. `inner`: width of the MLP. `vocab`:
    number of tokens. `has_head_norms`: query and key heads are normalised.
    """

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocab: int
    has_head_norms: bool = False

    @property
    def attention(self) -> str:
        """Return a name for the sizes that attention depends on; models with equal names are measured only once."""
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"


LLAMA_8B = Shape(
    name="llama-3.1-8b", layers=32, heads=32, kv_heads=8, head_dim=128, hidden=4096, inner=14336, vocab=128256
)
QWEN_8B = Shape(
    name="qwen3-8b",
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    hidden=4096,
    inner=12288,
    vocab=151936,
    has_head_norms=True,
)
LLAMA_1B = Shape(
    name="llama-3.2-1b", layers=16, heads=32, kv_heads=8, head_dim=64, hidden=2048, inner=8192, vocab=128256
)
TOY = Shape(name="toy", layers=2, heads=4, kv_heads=2, head_dim=32, hidden=64, inner=96, vocab=300, has_head_norms=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Sizes of all cases of a bench.

    `uneven`: the context lengths of one batch each. `pool_share`: fraction of the device's memory for the pool of the
    layout comparison. `case_bytes`: upper bound for any other pool.
    """

    shapes: tuple[Shape, ...]
    block_size: int
    block_sizes: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    uneven: tuple[tuple[int, ...], ...]
    chunks: tuple[int, ...]
    cached: tuple[int, ...]
    mixed: tuple[int, int, int, int]
    """Number of decodes, the context of each, rows of the chunk, context of the chunk."""
    typical_decode: tuple[int, int]
    """Batch size and context length for comparing block sizes, dtypes and layouts."""
    layout_decodes: tuple[tuple[int, int], ...]
    typical_chunk: tuple[int, int]
    """Rows of the chunk, and length of the cached context before them."""
    rows: tuple[int, ...]
    compiled_rows: tuple[int, ...]
    """Row counts for which torch.compile is measured too, which takes seconds each time."""
    moved_blocks: tuple[int, ...]
    sampled_rows: tuple[int, ...]
    matrices: tuple[tuple[int, int, int], ...]
    copy_bytes: int
    case_bytes: int
    pool_share: float


FULL = Grid(
    shapes=(LLAMA_8B, QWEN_8B, LLAMA_1B),
    block_size=64,
    block_sizes=(16, 32, 64, 128),
    batches=(1, 8, 32, 128, 256),
    contexts=(KIB, 8 * KIB, 32 * KIB),
    uneven=(
        (32 * KIB, *(512 for _ in range(63))),
        (128 * KIB, *(KIB for _ in range(8))),
        tuple(64 << (i % 9) for i in range(128)),
    ),
    chunks=(512, 2 * KIB, 8 * KIB),
    cached=(0, 8 * KIB),
    mixed=(32, 4 * KIB, 512, 8 * KIB),
    typical_decode=(32, 8 * KIB),
    layout_decodes=((32, 8 * KIB), (256, KIB)),
    typical_chunk=(2 * KIB, 8 * KIB),
    rows=(1, 32, 256, 2 * KIB, 8 * KIB),
    compiled_rows=(32, 2 * KIB),
    moved_blocks=(32, 128),
    sampled_rows=(1, 32, 256),
    matrices=(
        (8192, 8192, 8192),
        (8192, 4096, 28672),
        (8192, 14336, 4096),
        (2048, 4096, 6144),
        (2048, 4096, 28672),
        (512, 4096, 28672),
        (32, 4096, 28672),
    ),
    copy_bytes=4 << 30,
    case_bytes=36 << 30,
    pool_share=0.75,
)

QUICK = Grid(
    shapes=(LLAMA_8B,),
    block_size=64,
    block_sizes=(16, 64),
    batches=(1, 32),
    contexts=(KIB, 8 * KIB),
    uneven=((32 * KIB, *(512 for _ in range(63))),),
    chunks=(512, 2 * KIB),
    cached=(0, 8 * KIB),
    mixed=(32, 4 * KIB, 512, 8 * KIB),
    typical_decode=(32, 8 * KIB),
    layout_decodes=((32, 8 * KIB),),
    typical_chunk=(2 * KIB, 8 * KIB),
    rows=(32, 2 * KIB),
    compiled_rows=(),
    moved_blocks=(32,),
    sampled_rows=(32,),
    matrices=((8192, 8192, 8192), (2048, 4096, 28672)),
    copy_bytes=2 << 30,
    case_bytes=8 << 30,
    pool_share=0.75,
)

TINY = Grid(
    shapes=(TOY,),
    block_size=16,
    block_sizes=(32, 16),
    batches=(1, 3),
    contexts=(40,),
    uneven=((70, 3, 17),),
    chunks=(20,),
    cached=(0, 24),
    mixed=(2, 18, 5, 30),
    typical_decode=(3, 40),
    layout_decodes=((3, 40),),
    typical_chunk=(8, 24),
    rows=(1, 5),
    compiled_rows=(),
    moved_blocks=(3,),
    sampled_rows=(1, 2),
    matrices=((64, 64, 64),),
    copy_bytes=1 << 20,
    case_bytes=1 << 20,
    pool_share=0.0,
)
"""Toy sizes for a CPU, as a smoke test."""
