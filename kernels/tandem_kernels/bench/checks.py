"""Compare each kernel with its reference in plain torch, on real head and row sizes.

For half-precision inputs the reference computes in float32, so that the error is the kernel's and not the reference's
rounding. Inputs are random. Each kernel runs twice on them, and the two results must have the same bits, because a
difference indicates a race.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tandem_kernels import reference
from tandem_kernels.bench.case import Bench
from tandem_kernels.bench.grid import Grid, Shape
from tandem_kernels.bench.pools import Pool, batch_over, block_pool, normal, num_blocks_of
from tandem_kernels.bench.rows import sampling_rows
from tandem_kernels.contract import FLOAT8, HeadNorms, LayerKV

_EPS = 1e-5
_TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Upper bound on ‖result - reference‖ / ‖reference‖, by the dtype that a result is rounded to."""
_LAYERS = 2


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """Comparison of one kernel with its reference.

    `run` returns the relative error in the norm; the error of a kernel that must be exact is 0 or infinite."""

    name: str
    run: Callable[[Bench], float]
    tolerance: float


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check. `failure` is the exception that the check raised, if any; `error` is infinite then."""

    name: str
    error: float
    tolerance: float
    failure: str = ""

    @property
    def is_right(self) -> bool:
        """Return whether the kernel passed; an error of NaN fails."""
        return not self.failure and self.error <= self.tolerance


def run_check(check: KernelCheck, bench: Bench) -> CheckResult:
    """Run a check; an exception becomes a failed result."""
    try:
        return CheckResult(check.name, check.run(bench), check.tolerance)
    except Exception as error:
        return CheckResult(check.name, float("inf"), check.tolerance, f"{type(error).__name__}: {error}"[:300])


def checks(grid: Grid) -> Iterator[KernelCheck]:
    for shape in {shape.attention: shape for shape in grid.shapes}.values():
        for dtype in (torch.bfloat16, torch.float16, torch.float32, FLOAT8):
            yield _attention(shape, dtype, grid.block_size)
        yield _attention(shape, torch.bfloat16, grid.block_sizes[0])
    for shape in grid.shapes:
        for dtype in (torch.bfloat16, torch.float32):
            yield from _rows(shape, dtype)
        yield _rope_cache_write(shape, torch.bfloat16, grid.block_size)
    yield _rope_cache_write(grid.shapes[0], FLOAT8, grid.block_size)
    yield from _exact(grid)


def _attention(shape: Shape, dtype: torch.dtype, block_size: int) -> KernelCheck:
    """Check decodes with contexts around block boundaries, a padding sequence, and chunks with and without context."""
    compute = torch.bfloat16 if dtype == FLOAT8 else dtype
    edges = [1, block_size - 1, block_size, block_size + 1, 5 * block_size + 3]
    rows, contexts = [*[1] * len(edges), 1, 37, 2 * block_size + 5], [*edges, 0, 37, 6 * block_size + 1]

    def run(bench: Bench) -> float:
        num_blocks = num_blocks_of(contexts, block_size)
        pool = block_pool(bench, shape, dtype, block_size, num_blocks, _LAYERS)
        query = normal(bench, sum(rows), shape.heads, shape.head_dim, dtype=compute)
        batch = batch_over(bench, rows, contexts, block_size, num_blocks)
        scale = shape.head_dim**-0.5
        got = _twice(lambda: bench.kernels.paged_attention(query, pool.layer, batch, scale))
        on_host = replace(
            batch,
            query_starts=batch.query_starts.cpu(),
            context_lens=batch.context_lens.cpu(),
            block_tables=batch.block_tables.cpu(),
        )
        expected = reference.paged_attention(query.cpu().float(), _host(pool.layer), on_host, scale)
        return _error(got, expected)

    return KernelCheck(
        f"attention, {shape.attention} {_name(dtype)}, blocks of {block_size}", run, _TOLERANCES[compute]
    )


def _rows(shape: Shape, dtype: torch.dtype) -> Iterator[KernelCheck]:
    def norm(bench: Bench) -> float:
        x, weight = normal(bench, 33, shape.hidden, dtype=dtype), normal(bench, shape.hidden, dtype=dtype)
        got = _twice(lambda: bench.kernels.rms_norm(x, weight, _EPS))
        return _error(got, reference.rms_norm(x.cpu().float(), weight.cpu().float(), _EPS))

    def add_norm(bench: Bench) -> float:
        x, residual = (normal(bench, 33, shape.hidden, dtype=dtype) for _ in range(2))
        weight = normal(bench, shape.hidden, dtype=dtype)
        got, total = (
            _twice(lambda part=part: bench.kernels.add_rms_norm(x, residual, weight, _EPS)[part])  # type: ignore[misc]
            for part in range(2)
        )
        expected, sums = reference.add_rms_norm(x.cpu(), residual.cpu(), weight.cpu(), _EPS)
        return max(_error(got, expected.float()), _same(total, sums))

    def product(bench: Bench) -> float:
        x, weight = (normal(bench, rows, shape.hidden, dtype=dtype) for rows in (133, 520))
        got = _twice(lambda: bench.kernels.linear(x, weight, None))
        return _error(got, torch.nn.functional.linear(x.cpu().float(), weight.cpu().float()))

    def gate(bench: Bench) -> float:
        gate_up = normal(bench, 33, 2 * shape.inner, dtype=dtype)
        got = _twice(lambda: bench.kernels.silu_mul(gate_up))
        return _error(got, reference.silu_mul(gate_up.cpu().float()))

    for name, run in (("linear", product), ("rms-norm", norm), ("add and rms-norm", add_norm), ("silu-mul", gate)):
        yield KernelCheck(f"{name}, {shape.name} {_name(dtype)}", run, _TOLERANCES[dtype])


def _rope_cache_write(shape: Shape, dtype: torch.dtype, block_size: int) -> KernelCheck:
    """Check the query, the written slots, and that nothing else was written; one row in nine has no slot."""
    compute = torch.bfloat16 if dtype == FLOAT8 else dtype

    def run(bench: Bench) -> float:
        pool = block_pool(bench, shape, dtype, block_size, 4, _LAYERS)
        before = pool.memory.to("cpu", copy=True)
        count = 2 * block_size + 3
        qkv = normal(bench, count, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=compute)
        angles = torch.rand(count, shape.head_dim // 2, device=bench.device).repeat(1, 2) * 6
        cos, sin = angles.cos().to(compute), angles.sin().to(compute)
        weight = normal(bench, shape.head_dim, dtype=compute)
        norms = HeadNorms(weight, weight.flip(0), _EPS) if shape.has_head_norms else None
        slots = torch.randperm(4 * block_size, device=bench.device)[:count]
        slots[::9] = -1
        got = _twice(lambda: bench.kernels.rope_cache_write(qkv, cos, sin, norms, pool.layer, slots))
        host = _host_layer(pool.layer, before.clone())
        on_host = norms and HeadNorms(norms.query.cpu(), norms.key.cpu(), _EPS)
        expected = reference.rope_cache_write(qkv.cpu(), cos.cpu(), sin.cpu(), on_host, host, slots.cpu())
        return max(_error(got, expected.float()), _planes_error(pool.layer, host), _other_layers(pool, before))

    tolerance = 5e-2 if dtype == FLOAT8 else _TOLERANCES[compute]
    return KernelCheck(f"rope and cache write, {shape.name} {_name(dtype)}", run, tolerance)


def _exact(grid: Grid) -> Iterator[KernelCheck]:
    """Yield the checks of block copies, digests and sampling, whose results must have the reference's bits."""
    shape, size = grid.shapes[0], grid.block_size

    def moved(bench: Bench) -> float:
        pool = block_pool(bench, shape, torch.bfloat16, size, 5, _LAYERS)
        ids, half = torch.tensor([3, 0, 4], device=bench.device), max(1, shape.kv_heads // 2)
        got = _twice(lambda: bench.kernels.pack_blocks(pool.memory, ids, half, shape.kv_heads))
        host = pool.memory.to("cpu", copy=True)
        error = _same(got, reference.pack_blocks(host, ids.cpu(), half, shape.kv_heads))
        bench.kernels.unpack_blocks(got, pool.memory, ids.flip(0), half)
        reference.unpack_blocks(got.cpu(), host, ids.cpu().flip(0), half)
        return max(error, _same(pool.memory, host))

    def digest(bench: Bench) -> float:
        pool = block_pool(bench, shape, torch.bfloat16, size, 5, shape.layers)
        ids, places = torch.tensor([3, 0, 4], device=bench.device), torch.tensor([0, 9, 70_000], device=bench.device)
        got = _twice(lambda: bench.kernels.block_digest(pool.memory, ids, places, head_start=2))
        return _same(got, reference.block_digest(pool.memory.cpu(), ids.cpu(), places.cpu(), head_start=2))

    def sampled(bench: Bench) -> float:
        error = 0.0
        for numbers in ((0.0, 0, 1.0, -torch.inf), (0.8, 0, 0.9, -torch.inf), (1.2, 50, 0.9, -3.0)):
            logits = normal(bench, 16, shape.vocab, dtype=torch.bfloat16).mul_(3)
            logits[5, 7] = torch.nan
            sampling = sampling_rows(bench.device, 16, *numbers)
            got = _twice(lambda logits=logits, sampling=sampling: bench.kernels.sample(logits, sampling))  # type: ignore[misc]
            on_host = sampling_rows(torch.device("cpu"), 16, *numbers)
            error = max(error, _same(got, reference.sample(logits.cpu(), on_host)))
        return error

    for name, run in (("pack and unpack", moved), ("digest", digest), ("sampling", sampled)):
        yield KernelCheck(f"{name}, {shape.name}", run, 0.0)


def _twice(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run a kernel twice and return its result. Raises AssertionError when the two results differ."""
    first, second = run(), run()
    # Compared as bits, because NaN does not equal itself.
    if not torch.equal(first.view(torch.uint8), second.view(torch.uint8)):
        raise AssertionError("two runs on the same inputs differ")
    return first


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    wide = expected.double()
    return float((got.cpu().double() - wide).norm() / wide.norm())


def _same(got: torch.Tensor, expected: torch.Tensor) -> float:
    return 0.0 if torch.equal(got.cpu(), expected) else float("inf")


def _host(kv: LayerKV) -> LayerKV:
    """Copy planes to contiguous host memory, half types as float32."""
    if kv.key_scale is None or kv.value_scale is None:
        return LayerKV(kv.key.cpu().float().contiguous(), kv.value.cpu().float().contiguous())
    return LayerKV(*(plane.cpu().contiguous() for plane in (kv.key, kv.value, kv.key_scale, kv.value_scale)))


def _host_layer(kv: LayerKV, memory: torch.Tensor) -> LayerKV:
    """Return the views that `kv` has of a pool, on a copy `memory` of the pool."""

    def same_view(plane: torch.Tensor) -> torch.Tensor:
        flat = memory.view(-1).view(plane.dtype)
        return flat.as_strided(plane.shape, plane.stride(), plane.storage_offset())

    key, value = same_view(kv.key), same_view(kv.value)
    if kv.key_scale is None or kv.value_scale is None:
        return LayerKV(key, value)
    return LayerKV(key, value, same_view(kv.key_scale), same_view(kv.value_scale))


def _planes_error(got: LayerKV, expected: LayerKV) -> float:
    """Return the larger error of the two planes, over all slots."""
    return max(
        _error(_floats(got.key, got.key_scale), _floats(expected.key, expected.key_scale)),
        _error(_floats(got.value, got.value_scale), _floats(expected.value, expected.value_scale)),
    )


def _floats(plane: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    wide = plane.cpu().float()
    return wide if scales is None else wide * scales.cpu()[..., None]


def _other_layers(pool: Pool, expected: torch.Tensor) -> float:
    """Return 0 if all layers but the written one are unchanged, else infinity."""
    written = _LAYERS // 2
    others = [i for i in range(_LAYERS) if i != written]
    return _same(pool.memory[:, :, others], expected[:, :, others])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
