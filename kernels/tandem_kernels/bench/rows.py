"""Build the cases of products and mixtures of experts, also in few bits, and of norms, gates, cache writes, copies of
blocks, digests and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tandem_kernels import reference
from tandem_kernels.bench.case import Bench, BenchCase, BenchWork
from tandem_kernels.bench.grid import Grid, Shape
from tandem_kernels.bench.pools import Pool, block_pool, normal
from tandem_kernels.bench.timing import Call
from tandem_kernels.contract import FLOAT8_GROUP, ExpertRouting, HeadNorms, SamplingRows
from tandem_kernels.device_codes import DeviceCodes
from tandem_kernels.dispatch import Weight
from tandem_kernels.reference.coded import CodedMatrix, NumberFormat, ScaleFormat, Scales, round_to_float8

_EPS = 1e-5
_DTYPE = torch.bfloat16
HALF_TOLERANCE = 1e-2
_FLOAT8_TOLERANCE = 1e-1
_SAMPLING_METHODS: tuple[tuple[str, float, int, float, float], ...] = (
    ("greedy", 0.0, 0, 1.0, -torch.inf),
    ("temperature", 0.8, 0, 1.0, -torch.inf),
    ("top-p 0.9", 0.8, 0, 0.9, -torch.inf),
    ("top-k 50, top-p 0.9", 0.8, 50, 0.9, -torch.inf),
    ("min-p 0.05", 0.8, 0, 1.0, -3.0),
)
"""Name, temperature, top-k, top-p, and the logarithm of min-p."""


def row_cases(grid: Grid) -> Iterator[BenchCase]:
    for shape in grid.shapes:
        for rows in grid.rows:
            yield BenchCase("rope and cache write", f"{shape.name} {rows} rows", _rope_cache_write(shape, rows))
            yield BenchCase("add and rms-norm", f"{shape.name} {rows} rows", _add_rms_norm(shape, rows))
            yield BenchCase("silu-mul", f"{shape.name} {rows} rows", _silu_mul(shape, rows))
    shape = grid.shapes[0]
    for rows in grid.rows:
        yield BenchCase("rms-norm", f"{shape.name} {rows} rows", _rms_norm(shape, rows))


def product_cases(grid: Grid) -> Iterator[BenchCase]:
    """Yield a case for each weight of a layer and each number of rows."""
    shape = grid.shapes[0]
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "qkv": (shape.hidden, query + 2 * kv),
        "output": (query, shape.hidden),
        "gate and up": (shape.hidden, 2 * shape.inner),
        "down": (shape.inner, shape.hidden),
    }
    for rows in grid.rows:
        for name, (inputs, outputs) in weights.items():
            yield BenchCase("linear", f"{shape.name} {name} {rows} rows", _linear(rows, inputs, outputs))


def coded_cases(grid: Grid) -> Iterator[BenchCase]:
    """Yield a case for each format of weights in few bits and each number of rows: of gate and up, and of experts."""
    shape = grid.shapes[0]
    for rows in grid.rows:
        for name, make in _FORMATS.items():
            build = _coded_linear(rows, shape.hidden, 2 * shape.inner, make)
            yield BenchCase("linear in few bits", f"{shape.name} gate and up, {name}, {rows} rows", build)
            mixture = _mixture(shape, rows, make)
            yield BenchCase("experts in few bits", f"{shape.name} 64 experts, 8 used, {name}, {rows} rows", mixture)


def mixture_cases(grid: Grid) -> Iterator[BenchCase]:
    """Yield a case for each number of rows, of 64 experts that are a sixteenth of the shape's MLP; a row has 8."""
    shape = grid.shapes[0]
    for rows in grid.rows:
        yield BenchCase("experts", f"{shape.name} 64 experts, 8 used, {rows} rows", _mixture(shape, rows))


def block_cases(grid: Grid) -> Iterator[BenchCase]:
    shape = grid.shapes[0]
    for count in grid.moved_blocks:
        name = f"{shape.name} {count} blocks of {grid.block_size} tokens"
        yield BenchCase("pack", f"{name}, half of the heads", _pack(shape, count))
        yield BenchCase("unpack", f"{name}, half of the heads", _unpack(shape, count))
        yield BenchCase("digest", name, _digest(shape, count))


def sampling_cases(grid: Grid) -> Iterator[BenchCase]:
    shape = grid.shapes[0]
    for rows in grid.sampled_rows:
        for name, *numbers in _SAMPLING_METHODS:
            yield BenchCase("sampling", f"{rows} rows of {shape.vocab}, {name}", _sample(shape, rows, *numbers))


def _compiled(bench: Bench, rows: int, function: Callable[..., object], *arguments: object) -> dict[str, Call]:
    """Return rivals: the plain function, and its torch.compile version for row counts in `grid.compiled_rows`."""
    variants: dict[str, Call] = {"plain torch": lambda: function(*arguments)}
    if rows in bench.grid.compiled_rows:
        fused = torch.compile(function, dynamic=False)
        variants["torch.compile"] = lambda: fused(*arguments)
    return variants


def _linear(rows: int, inputs: int, outputs: int) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        x, weight = normal(bench, rows, inputs, dtype=_DTYPE), normal(bench, outputs, inputs, dtype=_DTYPE)
        return BenchWork(
            run=lambda: bench.kernels.linear(x, weight, None),
            num_bytes=x.nbytes + weight.nbytes + rows * outputs * x.element_size(),
            flops=2 * rows * inputs * outputs,
            agreeing={"F.linear": lambda: torch.nn.functional.linear(x, weight)},
            tolerance=HALF_TOLERANCE,
        )

    return build


_Make = Callable[[Bench, torch.Tensor], Weight]
"""Makes a weight in few bits of one in floats."""


def _to_int4(bench: Bench, floats: torch.Tensor) -> Weight:
    """Round to integers of four bits with a float16 step and a zero per 128 components, as GPTQ and AWQ have."""
    n, k = floats.shape
    group = _group(k)
    wide = floats.float().view(n, k // group, group)
    least = wide.amin(-1).clamp(max=0)
    steps = ((wide.amax(-1).clamp(min=0) - least) / _MOST_INT4).clamp(min=1e-6).half()
    zeros = (-least / steps.float()).round()
    codes = (wide / steps.float()[..., None] + zeros[..., None]).round().clamp(0, _MOST_INT4)
    scales = Scales(ScaleFormat.HALF_ZEROS, (steps, zeros.to(torch.uint8)), group)
    matrix = CodedMatrix(NumberFormat.INT4, codes.to(torch.uint8).view(n, k), scales)
    return bench.kernels.to_weight(matrix, floats.device, floats.dtype)


def _to_float8(bench: Bench, floats: torch.Tensor) -> Weight:
    return bench.kernels.to_weight(round_to_float8(floats), floats.device, floats.dtype)


def _float8_rounding_rows(bench: Bench, floats: torch.Tensor) -> Weight:
    held = _to_float8(bench, floats)
    return held.with_rounded_rows() if isinstance(held, DeviceCodes) else held


_FORMATS: dict[str, _Make] = {
    "int4": _to_int4,
    "float8": _to_float8,
    "float8 and rows too": _float8_rounding_rows,
}
_MOST_INT4 = 15


def _group(width: int) -> int:
    return FLOAT8_GROUP if width % FLOAT8_GROUP == 0 else width


def _restored(weight: Weight, like: torch.Tensor) -> torch.Tensor:
    return weight.floats().to(like) if isinstance(weight, DeviceCodes) else weight


def _bytes_of(weight: Weight) -> int:
    return weight.num_bytes if isinstance(weight, DeviceCodes) else weight.nbytes


def _tolerance(weight: Weight) -> float:
    return _FLOAT8_TOLERANCE if isinstance(weight, DeviceCodes) and weight.rounds_rows else HALF_TOLERANCE


def _coded_linear(rows: int, inputs: int, outputs: int, make: _Make) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        x = normal(bench, rows, inputs, dtype=_DTYPE)
        weight = make(bench, normal(bench, outputs, inputs, dtype=_DTYPE))
        restored = _restored(weight, x)
        return BenchWork(
            run=lambda: bench.kernels.linear(x, weight, None),
            num_bytes=x.nbytes + _bytes_of(weight) + rows * outputs * x.element_size(),
            flops=2 * rows * inputs * outputs,
            agreeing={"F.linear of the restored weight": lambda: torch.nn.functional.linear(x, restored)},
            tolerance=_tolerance(weight),
        )

    return build


def _as_floats(_bench: Bench, floats: torch.Tensor) -> Weight:
    return floats


def _mixture(shape: Shape, rows: int, make: _Make = _as_floats) -> Callable[[Bench], BenchWork]:
    count, chosen, inner = 64, 8, max(32, shape.inner // 16)

    def build(bench: Bench) -> BenchWork:
        x = normal(bench, rows, shape.hidden, dtype=_DTYPE)
        held = [
            make(bench, normal(bench, count * n, k, dtype=_DTYPE))
            for n, k in ((2 * inner, shape.hidden), (shape.hidden, inner))
        ]
        logits = normal(bench, rows, count, dtype=torch.float32)
        experts, weights = reference.route(logits, None, ExpertRouting(chosen))
        weights = weights.to(_DTYPE)
        plain = partial(reference.mix_experts, linear=torch.nn.functional.linear, silu_mul=bench.kernels.silu_mul)
        restored = [_restored(weight, x).view(count, -1, weight.shape[1]) for weight in held]
        gate_up, down = (
            weight.split_rows(count) if isinstance(weight, DeviceCodes) else weight.view(count, -1, weight.shape[1])
            for weight in held
        )
        num_read = len(torch.unique(experts)) * sum(_bytes_of(weight) for weight in held) // count
        return BenchWork(
            run=lambda: bench.kernels.mix_experts(x, experts, weights, gate_up, down),
            num_bytes=2 * x.nbytes + num_read,
            flops=2 * rows * chosen * 3 * inner * shape.hidden,
            agreeing={"expert by expert": lambda: plain(x, experts, weights, *restored)},
            tolerance=_tolerance(held[0]),
        )

    return build


def _rms_norm(shape: Shape, rows: int) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        x, weight = normal(bench, rows, shape.hidden, dtype=_DTYPE), normal(bench, shape.hidden, dtype=_DTYPE)
        return BenchWork(
            run=lambda: bench.kernels.rms_norm(x, weight, _EPS),
            num_bytes=2 * x.nbytes + weight.nbytes,
            rivals=_compiled(bench, rows, reference.rms_norm, x, weight, _EPS),
            agreeing={"F.rms_norm": lambda: torch.nn.functional.rms_norm(x, (shape.hidden,), weight, _EPS)},
            tolerance=HALF_TOLERANCE,
        )

    return build


def _add_rms_norm(shape: Shape, rows: int) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        x, residual = (normal(bench, rows, shape.hidden, dtype=_DTYPE) for _ in range(2))
        weight = normal(bench, shape.hidden, dtype=_DTYPE)
        return BenchWork(
            run=lambda: bench.kernels.add_rms_norm(x, residual, weight, _EPS),
            num_bytes=4 * x.nbytes + weight.nbytes,
            rivals=_compiled(bench, rows, reference.add_rms_norm, x, residual, weight, _EPS),
        )

    return build


def _silu_mul(shape: Shape, rows: int) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        gate_up = normal(bench, rows, 2 * shape.inner, dtype=_DTYPE)
        return BenchWork(
            run=lambda: bench.kernels.silu_mul(gate_up),
            num_bytes=gate_up.nbytes + gate_up.nbytes // 2,
            rivals=_compiled(bench, rows, reference.silu_mul, gate_up),
            agreeing={"plain torch": lambda: reference.silu_mul(gate_up)},
            tolerance=HALF_TOLERANCE,
        )

    return build


def _rope_cache_write(shape: Shape, rows: int) -> Callable[[Bench], BenchWork]:
    """Build the work of writing to slots of blocks in random order."""

    def build(bench: Bench) -> BenchWork:
        heads, dim = shape.heads + 2 * shape.kv_heads, shape.head_dim
        size = bench.grid.block_size
        num_blocks = -(-rows // size) + 1
        pool = block_pool(bench, shape, _DTYPE, size, num_blocks, 2)
        qkv = normal(bench, rows, heads * dim, dtype=_DTYPE)
        cos, sin = (normal(bench, rows, dim // 2, dtype=_DTYPE).repeat(1, 2) for _ in range(2))
        weight = normal(bench, dim, dtype=_DTYPE)
        norms = HeadNorms(weight, weight.flip(0), _EPS) if shape.has_head_norms else None
        places = torch.arange(rows, device=bench.device)
        order = torch.randperm(num_blocks, device=bench.device)
        slots = order[places // size] * size + places % size
        return BenchWork(
            run=lambda: bench.kernels.rope_cache_write(qkv, cos, sin, norms, pool.layer, slots),
            num_bytes=2 * qkv.nbytes + 2 * cos.nbytes + slots.nbytes,
            agreeing={"plain torch": lambda: reference.rope_cache_write(qkv, cos, sin, norms, pool.layers[0], slots)},
            tolerance=HALF_TOLERANCE,
            waits=frozenset({"plain torch"}),
        )

    return build


def _moved(bench: Bench, shape: Shape, count: int) -> tuple[Pool, torch.Tensor]:
    """Build a pool of all layers, and the ids of every other block in random order."""
    pool = block_pool(bench, shape, _DTYPE, bench.grid.block_size, 2 * count, shape.layers)
    return pool, 2 * torch.randperm(count, device=bench.device)


def _pack(shape: Shape, count: int) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        pool, ids = _moved(bench, shape, count)
        heads = max(1, shape.kv_heads // 2)
        return BenchWork(
            run=lambda: bench.kernels.pack_blocks(pool.memory, ids, 0, heads),
            num_bytes=2 * count * pool.memory[0, :heads].numel() * pool.memory.element_size(),
            agreeing={"plain torch": lambda: reference.pack_blocks(pool.memory, ids, 0, heads)},
        )

    return build


def _unpack(shape: Shape, count: int) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        pool, ids = _moved(bench, shape, count)
        heads = max(1, shape.kv_heads // 2)
        packed = pool.memory[ids, :heads].clone()
        return BenchWork(
            run=lambda: bench.kernels.unpack_blocks(packed, pool.memory, ids, 0),
            num_bytes=2 * packed.nbytes,
            rivals={"plain torch": lambda: reference.unpack_blocks(packed, pool.memory, ids, 0)},
        )

    return build


def _digest(shape: Shape, count: int) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        pool, ids = _moved(bench, shape, count)
        places = torch.arange(count, device=bench.device)
        return BenchWork(
            run=lambda: bench.kernels.block_digest(pool.memory, ids, places),
            num_bytes=count * pool.memory[0].numel() * pool.memory.element_size(),
        )

    return build


def _sample(
    shape: Shape, rows: int, temperature: float, top_k: float, top_p: float, log_min_p: float
) -> Callable[[Bench], BenchWork]:
    def build(bench: Bench) -> BenchWork:
        logits = normal(bench, rows, shape.vocab, dtype=_DTYPE).mul_(3)
        sampling = sampling_rows(bench.device, rows, temperature, int(top_k), top_p, log_min_p)
        rivals: dict[str, Call] = {}
        if temperature == 0:
            rivals["argmax"] = lambda: logits.argmax(-1)
        elif not top_k and log_min_p == -torch.inf:
            method = "softmax, sort, multinomial" if top_p < 1 else "softmax, multinomial"
            rivals[method] = lambda: _torch_sample(logits, temperature, top_p)
        return BenchWork(
            run=lambda: bench.kernels.sample(logits, sampling),
            num_bytes=logits.nbytes + 8 * rows,
            rivals=rivals,
            waits=frozenset(rivals) - {"argmax"},
        )

    return build


def sampling_rows(
    device: torch.device, rows: int, temperature: float, top_k: int, top_p: float, log_min_p: float
) -> SamplingRows:
    """Return sampling parameters for `rows` rows that are equal except for the rows' seed and index."""
    numbers = torch.arange(rows, device=device)
    return SamplingRows(
        temperature=torch.full((rows,), temperature, dtype=torch.float64, device=device),
        top_k=torch.full((rows,), top_k, dtype=torch.int64, device=device),
        top_p=torch.full((rows,), top_p, dtype=torch.float64, device=device),
        log_min_p=torch.full((rows,), log_min_p, dtype=torch.float64, device=device),
        seed=numbers * 7919 - 3,
        choice=torch.zeros_like(numbers),
        index=numbers,
    )


def _torch_sample(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Sample as serving programs without their own kernel do: in float32, with torch's stateful generator."""
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        probabilities, ids = probabilities.sort(dim=-1, descending=True)
        probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > top_p, 0.0)
        return ids.gather(-1, torch.multinomial(probabilities, 1))
    return torch.multinomial(probabilities, 1)
