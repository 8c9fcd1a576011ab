"""Triton's paged attention against the reference in float64, over ragged grids; the full grid is nightly."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tandem_kernels.contract import AttentionBatch, LayerKV
from tandem_kernels.triton import decode_attention, prefill_attention
from tandem_kernels.triton.attention import paged_attention
from tests.covering import covering
from tests.kernels.batches import attention_batch
from tests.kernels.triton.attention_cases import (
    LAYERS,
    SCALE,
    Case,
    Problem,
    assert_close,
    float8_planes,
    problem_of,
)


def run(problem: Problem) -> torch.Tensor:
    return paged_attention(problem.query, problem.kv, problem.batch, SCALE)


def check(problem: Problem) -> None:
    assert_close(run(problem), problem)


def _spans(block: int) -> dict[str, tuple[tuple[tuple[int, int], ...], int]]:
    """Spans and how many of them are decodes."""
    edges = ((1, 1), (1, block - 1), (1, 0), (1, block), (1, block + 1))
    return {
        "decodes": ((*edges, (1, 300), (1, 2 * block)), 7),
        # Few rows, of which a tile holds all; the second has tokens of one slice that its first rows do not see.
        "short": ((*edges[:3], (3, 40), (5, 258), (1, 0), (2, 2), (1, block + 1), (4, 4)), 3),
        # A prompt, a chunk, one that ends with a block, and single rows that are none of the decodes.
        "long": (((1, 270), (1, 0), (65, 65), (17, block + 20), (1, 0), (1, 2 * block), (9, 2 * block + 8)), 2),
    }


_SHAPES = ("decodes", "short", "long")
_GROUPS = ((1, 3), (1, 8), (2, 1), (2, 4))
_DIMS = (64, 80, 96, 128, 256)
_BLOCKS = (16, 32, 64, 128)
_KINDS = tuple(itertools.product((torch.float32, torch.bfloat16, torch.float16), (False, True)))


_GRID = list(itertools.product(_SHAPES, _GROUPS, _DIMS, _BLOCKS, _KINDS))


def _case(shape: str, group: tuple[int, int], dim: int, block: int, kind: tuple[torch.dtype, bool]) -> Case:
    spans, num_decodes = _spans(block)[shape]
    return Case(spans, num_decodes, *group, dim, block, *kind)


@pytest.mark.parametrize("case", [_case(*row) for row in covering(_GRID)], ids=str)
def test_any_two_of_the_grid(case: Case, device: torch.device) -> None:
    check(problem_of(case, device))


@pytest.mark.nightly
@pytest.mark.parametrize("case", [_case(*row) for row in _GRID], ids=str)
def test_the_full_grid(case: Case, device: torch.device) -> None:
    check(problem_of(case, device))


@pytest.mark.parametrize("group", [1, 32])
@pytest.mark.parametrize("block_size", [1, 8, 256])
def test_other_sizes(block_size: int, group: int, device: torch.device) -> None:
    case = Case(((1, 30), (1, 24), (4, 30), (1, 1)), 2, 1, group, 16, block_size, torch.bfloat16)
    check(problem_of(case, device))


@pytest.mark.parametrize("rows", [1, 30])
def test_rows_that_lie_apart(rows: int, device: torch.device) -> None:
    problem = problem_of(Case(((rows, 40),), int(rows == 1)), device)
    wide = torch.randn((rows, 12, 64), device=device)
    wide[:, 2:10] = problem.query
    apart = replace(problem, query=wide[:, 2:10])
    assert torch.equal(run(apart), run(problem))


@pytest.mark.parametrize("float8", [False, True])
def test_long_contexts(float8: bool, device: torch.device) -> None:
    """On a GPU those that it is for; one is longer than all parts have slices."""
    unit = 1 if device.type == "cuda" else 64
    spans = ((1, 40000 // unit), (1, 7), (1, 20001 // unit), (1, 0), (2048 // unit, 6000 // unit), (900 // unit,) * 2)
    case = Case(spans, 4, 2, 4, 128, 16, torch.bfloat16, float8)
    check(problem_of(case, device))


def test_no_rows(device: torch.device) -> None:
    problem = problem_of(Case((), 0), device)
    assert run(problem).shape == (0, 8, 64)


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_places_that_nobody_has(num_decodes: int, device: torch.device) -> None:
    """Tables have no room for a single block."""
    problem = problem_of(Case(((1, 0), (1, 0)), num_decodes), device)
    assert problem.batch.block_tables.shape == (2, 0)
    assert not run(problem).any()


@pytest.mark.parametrize("num_decodes", [0, 1])
def test_one_row(num_decodes: int, device: torch.device) -> None:
    case = Case(((1, 1),), num_decodes)
    check(problem_of(case, device))


def shorten_slices(monkeypatch: pytest.MonkeyPatch, block_n: int = 32, slice_tokens: int = 64) -> None:
    """Have contexts of a few hundred tokens several slices, each of two tiles unless other sizes are given."""
    tiles = decode_attention.DecodeTiles(block_n, slice_tokens, 4, 3)
    monkeypatch.setattr(decode_attention, "TILES", dict.fromkeys(decode_attention.TILES, tiles))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_several_slices(dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_slices(monkeypatch)
    monkeypatch.setattr(decode_attention, "_PARTS_OF_ALL_HEADS", 2)
    # Four slices and a half; the last whole; one token in the fifth; none in the second part; a chunk across slices.
    spans = ((1, 288), (1, 256), (1, 257), (1, 64), (3, 130))
    case = Case(spans, 4, 1, 2, 128, 64, dtype)
    check(problem_of(case, device))


def test_the_programs_of_a_launch_do_not_matter(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_slices(monkeypatch)
    case = Case(((1, 275), (1, 75), (2, 200)), 2, 1, 4, 128, 32, torch.bfloat16)
    problem = problem_of(case, device)
    many = run(problem)
    monkeypatch.setattr(decode_attention, "_PROGRAMS", 1)
    monkeypatch.setattr(decode_attention, "_LEAST_PROGRAMS", 1)
    assert torch.equal(run(problem), many)


@pytest.mark.parametrize("spans", [((1, 275), (1, 0), (1, 200)), ((2, 275), (3, 3), (4, 200))])
def test_partial_results_take_no_more_than_there_is_room_for(
    spans: tuple[tuple[int, int], ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_slices(monkeypatch)
    max_rows = max(rows for rows, _ in spans)
    case = Case(spans, len(spans) if max_rows == 1 else 0, 1, 2, 128, 32, torch.bfloat16)
    problem = problem_of(case, device)
    together = run(problem)
    launched: list[int] = []
    launch = decode_attention._launch

    def noted(*given: object) -> None:
        span = given[5]
        assert isinstance(span, range)
        launched.append(len(span))
        launch(*given)

    monkeypatch.setattr(decode_attention, "_launch", noted)
    # Of a row: a table's five slices, each 2 query heads of 128 numbers and a logarithm.
    row_bytes = 5 * 2 * 129 * 4
    for sequences, expected_launches in ((0, [1, 1, 1]), (1, [1, 1, 1]), (2, [2, 1]), (3, [3])):
        launched.clear()
        monkeypatch.setattr(decode_attention, "SCRATCH_BYTES", sequences * max_rows * row_bytes)
        assert torch.equal(run(problem), together)
        assert launched == expected_launches


@pytest.mark.parametrize("rows", [1, 20])
def test_small_values_in_float8(rows: int, device: torch.device) -> None:
    """A weight times a scale of them is less than float16 can tell from zero."""
    case = Case(((rows, 200),), int(rows == 1), dtype=torch.float16, float8=True)
    problem = problem_of(case, device)
    assert problem.kv.value_scale is not None
    problem.kv.value_scale.mul_(1e-3)
    check(problem)


def test_a_row_does_not_depend_on_its_batch(device: torch.device) -> None:
    case = Case(((1, 0), (1, 700), (1, 40), (40, 90), (70, 70)), 3, dtype=torch.bfloat16)
    problem = problem_of(case, device)
    together = run(problem)
    starts = [0, 1, 2, 3, 43, 113]
    for i, span in enumerate(case.spans):
        mine = slice(starts[i], starts[i + 1])
        table = problem.batch.block_tables[i : i + 1, : -(-span[1] // case.block_size) or 1]
        alone = attention_batch([span], table, int(i < case.num_decodes), device)
        assert torch.equal(paged_attention(problem.query[mine], problem.kv, alone, SCALE), together[mine])


def test_a_row_does_not_depend_on_where_its_chunk_begins(device: torch.device) -> None:
    # Among the tiles one ends with the first token of a tile of keys: 97 + 128 / 4 - 1 = 128.
    first, count = 97, 90
    case = Case(((count, first + count),), 0, dtype=torch.bfloat16)
    problem = problem_of(case, device)
    check(problem)
    whole = run(problem)
    chunks = []
    for start, stop in itertools.pairwise([first, first + 17, first + 54, first + count]):
        part = attention_batch([(stop - start, stop)], problem.batch.block_tables, 0, device)
        chunks.append(paged_attention(problem.query[start - first : stop - first], problem.kv, part, SCALE))
    assert torch.equal(torch.cat(chunks), whole)


def test_what_lies_beyond_the_context_does_not_matter(device: torch.device) -> None:
    case = Case(((1, 5), (1, 270), (20, 30), (3, 9)), 2, dtype=torch.bfloat16, block_size=64)
    problem = problem_of(case, device)
    before = run(problem)
    for (_, context), table in zip(case.spans, problem.batch.block_tables.tolist(), strict=True):
        for plane in (problem.kv.key, problem.kv.value):
            plane[table[(context - 1) // 64], :, context % 64 or 64 :] = -1e30
    wider = torch.randint(len(problem.kv.key), (4, 9), dtype=torch.int32, device=device)
    problem = replace(
        problem, batch=replace(problem.batch, block_tables=torch.cat([problem.batch.block_tables, wider], 1))
    )
    assert torch.equal(run(problem), before)


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("rows", [1, 20])
def test_a_block_beyond_two_to_the_31_elements(rows: int, float8: bool, block_size: int, device: torch.device) -> None:
    """Elements of scales too. The pool of one head is mapped, not filled: only the two blocks that are read have
    pages."""
    case = Case(((rows, block_size + 14),), int(rows == 1), 1, 4, 64, block_size, torch.bfloat16, float8)
    small = problem_of(case, device)
    tile = block_size * (64 + 4) if float8 else block_size * 64
    last = (2**33 if float8 else 2**31) // (2 * tile) + 5
    pool = _mapped((last + 1) * 2 * tile, torch.uint8 if float8 else torch.bfloat16, device)
    if float8:
        large = float8_planes(pool.view(last + 1, 1, 1, 2, tile), 0, block_size, 64)
    else:
        planes = pool.view(last + 1, 1, 2, block_size, 64)
        large = LayerKV(planes[:, :, 0], planes[:, :, 1])
    places = small.batch.block_tables[0].tolist()
    for old, new in zip(places, (last, last - 1), strict=True):
        for name in ("key", "value", "key_scale", "value_scale") if float8 else ("key", "value"):
            source, target = getattr(small.kv, name), getattr(large, name)
            # As bytes: not every copy knows float8.
            target[new].view(torch.uint8).copy_(source[old].contiguous().view(torch.uint8))
    table = torch.tensor([[last, last - 1]], dtype=torch.int32, device=device)
    moved = replace(small, kv=large, batch=replace(small.batch, block_tables=table))
    assert all(plane.stride(0) * (last - 1) > 2**31 for plane in (large.key, large.key_scale) if plane is not None)
    assert torch.equal(run(moved), run(small))


def _mapped(numbers: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.zeros(numbers, dtype=dtype, device=device)
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's; Python 3.11 does not name it
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    return torch.frombuffer(mmap.mmap(-1, numbers * dtype.itemsize, flags=flags), dtype=dtype)


def test_a_captured_launch_serves_other_contexts(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("CUDA graphs need a GPU")
    case = Case(((1, 700), (1, 33), (1, 0), (1, 16)), 4, dtype=torch.bfloat16)
    problem = problem_of(case, device)
    run(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(problem)
    for lens in ([700, 33, 0, 16], [0, 1, 300, 16], [257, 0, 0, 640]):
        problem.batch.context_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, run(problem))


class _Launches:
    """Keeps the grids that it is asked to launch."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.grids.append(grid)
        return lambda *arguments, **constants: None


@pytest.mark.parametrize(
    ("num_decodes", "chunks", "width", "grids"),
    [
        # 256 parts over all heads; those of contexts that tables cannot hold are not launched.
        (1, 0, 2048, {"split": [(8, 1, 32)], "join": [(32, 1, 1)], "chunk": []}),
        (1, 0, 64, {"split": [(8, 1, 4)], "join": [(32, 1, 1)], "chunk": []}),
        (1, 0, 16, {"split": [(8, 1, 1)], "join": [], "chunk": []}),
        (32, 0, 2048, {"split": [(8, 32, 8)], "join": [(32, 32, 1)], "chunk": []}),
        (256, 0, 2048, {"split": [(8, 256, 4)], "join": [(32, 256, 1)], "chunk": []}),
        (0, 2, 2048, {"split": [], "join": [], "chunk": [(8, 16, 2)]}),
        (3, 1, 16, {"split": [(8, 3, 1)], "join": [], "chunk": [(8, 16, 1)]}),
    ],
)
def test_launches_follow_from_shapes(
    num_decodes: int, chunks: int, width: int, grids: dict[str, list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors without numbers: to read one is an error. Chunks have up to 512 rows."""
    split, join, chunked = _Launches(), _Launches(), _Launches()
    monkeypatch.setattr(decode_attention, "_split_kernel", split)
    monkeypatch.setattr(decode_attention, "_join_kernel", join)
    monkeypatch.setattr(prefill_attention, "_chunk_kernel", chunked)
    count = num_decodes + chunks
    planes = torch.empty((9, 8, LAYERS, 2, 16, 128), dtype=torch.bfloat16, device="meta")
    batch = AttentionBatch(
        query_starts=torch.empty(count + 1, dtype=torch.int32, device="meta"),
        context_lens=torch.empty(count, dtype=torch.int32, device="meta"),
        block_tables=torch.empty((count, width), dtype=torch.int32, device="meta"),
        num_decodes=num_decodes,
        max_rows=512 if chunks else 1,
    )
    query = torch.empty((num_decodes + 512 * chunks, 32, 128), dtype=torch.bfloat16, device="meta")
    out = paged_attention(query, LayerKV(planes[:, :, 0, 0], planes[:, :, 0, 1]), batch, SCALE)
    assert out.shape == query.shape
    assert {"split": split.grids, "join": join.grids, "chunk": chunked.grids} == grids


def test_what_is_not_supported_is_refused(device: torch.device) -> None:
    problem = problem_of(Case(((1, 5),), 1), device)
    query, kv = problem.query, problem.kv
    for bad, words in (
        (query.double(), "float64"),
        (query.half(), "only float8"),
        (query[:, :, :32], "do not go with"),
        (query[:, :7], "do not go with"),
        (query.transpose(1, 2).contiguous().transpose(1, 2), "side by side"),
    ):
        with pytest.raises(ValueError, match=words):
            paged_attention(bad, kv, problem.batch, SCALE)
    wide = LayerKV(*(torch.zeros((2, 1, 16, 512), device=device) for _ in range(2)))
    with pytest.raises(ValueError, match="do not go with"):
        paged_attention(torch.zeros((1, 2, 512), device=device), wide, problem.batch, SCALE)
    with pytest.raises(ValueError, match="power of two"):
        paged_attention(query, LayerKV(kv.key[:, :, :12], kv.value[:, :, :12]), problem.batch, SCALE)
    with pytest.raises(ValueError, match="scale is 0"):
        paged_attention(query, kv, problem.batch, 0)
    turned = LayerKV(kv.key.transpose(2, 3), kv.value.transpose(2, 3))
    square = torch.zeros((1, 8, 16), device=device)
    with pytest.raises(ValueError, match="not a plane"):
        paged_attention(square, turned, problem.batch, SCALE)
    with pytest.raises(ValueError, match="not a plane"):
        paged_attention(query, LayerKV(kv.key, kv.value.contiguous()), problem.batch, SCALE)
