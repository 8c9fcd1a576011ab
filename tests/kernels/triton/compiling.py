"""A program that compiles for a GPU what calls of kernels would launch, where none is; runs no kernel.

Tensors have no memory, so that a call fails that looks at a number on the host: it would wait for the device, and could
not be captured in a CUDA graph.

`python -m tests.kernels.triton.compiling TYPE... [codes|every-format]` prints the name of each kernel that was
compiled, once for each way, `of codes` or `of float8` behind it where weights are in few bits or products in float8,
and `wgmma` where it multiplies by Hopper's own instructions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tandem_kernels.contract import FLOAT8, FLOAT8_GROUP, HeadNorms, LayerKV, SamplingRows
from tandem_kernels.device_codes import DeviceCodes, has_nibbles
from tandem_kernels.reference.coded import NumberFormat, ScaleFormat, Scales
from tandem_kernels.triton import BATCH_INVARIANT, KERNELS
from tests.kernels.codes import FORMATS

_WITHOUT_STACK = ("_gate_up_kernel", "_down_kernel", "_linear_kernel")
"""Kernels whose threads should keep everything in registers."""
_HOPPER = GPUTarget("cuda", 90, 32)


class _NoGPU:
    """What a compilation asks a driver."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _HOPPER


def compile_instead(found: dict[str, Any]) -> None:
    """From now on a launch compiles, and the compiled kernel goes to `found`."""

    def bind(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid) and max((*grid[1:], 0)) < 1 << 16

        def launch(*args: Any, **options: Any) -> None:
            compiled = kernel.run(*args, grid=grid, warmup=True, **options)
            numbers, *_, is_float8 = options.get("FORM", (0, False))
            kind = " of float8" if is_float8 else " of codes" if numbers else ""
            found[f"{kernel.__name__}{kind} {compiled.hash}"] = compiled

        return launch

    JITFunction.__getitem__ = bind
    driver.set_active(_NoGPU())


def stack_of(cubin: bytes) -> int:
    """Return the bytes that a thread keeps in memory because registers do not hold them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(size) for size in re.findall(r"STACK:(\d+)", output))


def _codes(n: int, k: int, numbers: NumberFormat, scales: Scales) -> DeviceCodes:
    per_byte = 2 if has_nibbles(numbers) else 1
    return DeviceCodes(numbers, torch.zeros(n, k // per_byte, dtype=torch.uint8), scales, (n, k))


def weight_of(name: str, n: int, k: int) -> DeviceCodes:
    """Return a weight of one of the `FORMATS`, without memory; of a row length that the format can have."""
    format = FORMATS[name]
    with torch.device("cpu"):
        matrix = format.random(1, k)
    parts = tuple(torch.zeros(n, part.shape[1], dtype=part.dtype) for part in matrix.scales.parts)
    return _codes(n, matrix.shape[1], format.numbers, replace(matrix.scales, parts=parts))


def float8_weight(n: int, k: int) -> DeviceCodes:
    """Return a weight whose products round rows, without memory."""
    scales = Scales(ScaleFormat.FLOAT, (torch.zeros(n, k // FLOAT8_GROUP),), FLOAT8_GROUP)
    return _codes(n, k, NumberFormat.E4M3, scales).with_rounded_rows()


def _call_products_of_codes(dtype: torch.dtype, names: Iterable[str]) -> None:
    makers = [partial(weight_of, name) for name in names]
    for rows in (2, 256):
        chosen, weights = torch.zeros(rows, 8, dtype=torch.int64), torch.zeros(rows, 8)
        for make in (*makers, float8_weight):
            weight = make(4096, 4096)
            KERNELS.linear(torch.zeros(rows, weight.shape[1], dtype=dtype), weight, None)
            gate_up = make(64 * 2 * 768, 2048)
            down = make(64 * gate_up.shape[1], 768)
            if down.shape[1] == 768:
                x = torch.zeros(rows, gate_up.shape[1], dtype=dtype)
                KERNELS.mix_experts(x, chosen, weights, gate_up.split_rows(64), down.split_rows(64))


def _call_others(dtype: torch.dtype) -> None:
    row, weight, ids = torch.zeros(2, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), torch.tensor([1, 0])
    KERNELS.rms_norm(row, weight, 1e-5)
    KERNELS.add_rms_norm(row, row, weight, 1e-5)
    KERNELS.silu_mul(row)
    if dtype != torch.float64:
        for outputs, bias in ((96, weight[:96]), (20_000, None)):
            BATCH_INVARIANT.linear(row, torch.zeros(outputs, 4096, dtype=dtype), bias)
        for rows in (2, 256):
            # Few rows are multiplied by instructions of fewer rows than Hopper's own.
            chosen, weights = torch.zeros(rows, 8, dtype=torch.int64), torch.zeros(rows, 8)
            matrices = torch.zeros(64, 2 * 768, 2048, dtype=dtype), torch.zeros(64, 2048, 768, dtype=dtype)
            KERNELS.mix_experts(torch.zeros(rows, 2048, dtype=dtype), chosen, weights, *matrices)
    doubles, longs = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    rows = SamplingRows(doubles, longs, doubles, doubles, longs, longs, longs)
    # A number that is 1 is a constant to the compiler.
    for vocab in (1, 128_256) if dtype == torch.float32 else (128_256,):
        KERNELS.sample(torch.zeros(2, vocab, dtype=dtype), rows)
    dim = 80
    pool, numbers = torch.zeros(4, 2, 2, 2, 16, dim, dtype=dtype), torch.zeros(4, 2, 16, dim, dtype=FLOAT8)
    qkv, table, norm = torch.zeros(2, 8 * dim, dtype=dtype), torch.zeros(2, dim, dtype=dtype), row[0, :dim]
    plain = LayerKV(pool[:, :, 1, 0], pool[:, :, 1, 1])
    scaled = LayerKV(numbers, numbers, torch.zeros(4, 2, 16), torch.zeros(4, 2, 16))
    KERNELS.rope_cache_write(qkv, table, table, None, plain, ids)
    KERNELS.rope_cache_write(qkv, table, table, HeadNorms(norm, norm, 1e-6), scaled, ids)
    KERNELS.unpack_blocks(KERNELS.pack_blocks(pool, ids, 1, 2), pool, ids, 0)
    KERNELS.block_digest(pool, ids, ids)
    if dtype == torch.float32:
        # Torch loads its own compiler for this, which takes more than a second.
        KERNELS.rope_tables(ids, torch.zeros(dim // 2), 1.0, dtype)


def main(types: list[str]) -> None:
    """Compile for each of the types; products with weights in few bits alone if `codes` (of Q4_K) or `every-format` is
    among them, else all other kernels."""
    formats = FORMATS if "every-format" in types else ("q4_k",) if "codes" in types else ()
    kernels: dict[str, Any] = {}
    compile_instead(kernels)
    with torch.device("meta"):
        for dtype in (getattr(torch, name) for name in types if name not in ("codes", "every-format")):
            if formats:
                _call_products_of_codes(dtype, formats)
            else:
                _call_others(dtype)
    for name, compiled in kernels.items():
        assert compiled.asm["cubin"], name
        # Some conversions multiply subnormal numbers, which are not to become zeros.
        assert " of " not in name or ".ftz" not in compiled.asm["ptx"], name
        instruction = " wgmma" if "wgmma.mma_async" in compiled.asm["ptx"] else ""
        kind = name.split()[0]
        stack = stack_of(compiled.asm["cubin"]) if kind in _WITHOUT_STACK else 0
        what = name.rpartition(" ")[0]
        sys.stdout.write(f"{what}{instruction}{f' stack {stack}' if stack else ''}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
