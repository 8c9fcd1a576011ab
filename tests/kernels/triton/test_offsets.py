"""Blocks that lie more than 2**31 numbers or words from the start of the pool, in memory of which a few pages are
touched."""

from __future__ import annotations

import mmap

import pytest
import torch

from tandem_kernels import reference
from tandem_kernels.triton import KERNELS
from tests.kernels.triton.tensors import layer_of, randn

_BLOCK_SIZE, _DIM, _GROUPS, _LAYERS = 16, 128, 4, 32
_BLOCK = _GROUPS * _LAYERS * 2 * _BLOCK_SIZE * _DIM
_WORD_BYTES = 8  # the widest that blocks are copied and digested in
_BLOCKS = (1 << 31) * _WORD_BYTES // (2 * _BLOCK) + 3
_FAR = _BLOCKS - 1
_MAP_NORESERVE = 0x4000  # of Linux; Python has a name for it from 3.13 on


@pytest.fixture(scope="module")
def pool(device: torch.device) -> torch.Tensor:
    """`[N, G, L, 2, B, D]` of bfloat16, a little more than 16 GiB; on the CPU of pages that no one has yet."""
    shape = (_BLOCKS, _GROUPS, _LAYERS, 2, _BLOCK_SIZE, _DIM)
    if device.type == "cuda":
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, _BLOCKS * _BLOCK * 2, flags=flags)
    return torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)


def test_the_last_block_is_far(pool: torch.Tensor) -> None:
    assert (_FAR - 1) * pool.stride(0) * pool.element_size() // _WORD_BYTES > 1 << 31


def test_cache_write(pool: torch.Tensor, device: torch.device) -> None:
    qkv = randn(1, 6 * _GROUPS * _DIM // 2, dtype=torch.bfloat16).to(device)
    cos, sin = torch.ones(1, _DIM, dtype=torch.bfloat16), torch.zeros(1, _DIM, dtype=torch.bfloat16)
    slots = torch.tensor([_FAR * _BLOCK_SIZE + 3])
    kv = layer_of(pool, _LAYERS - 1, _BLOCK_SIZE, _DIM)
    KERNELS.rope_cache_write(qkv, cos.to(device), sin.to(device), None, kv, slots.to(device))
    heads = qkv.view(-1, _DIM)
    assert torch.equal(pool[_FAR, :, -1, 0, 3], heads[-2 * _GROUPS : -_GROUPS])
    assert torch.equal(pool[_FAR, :, -1, 1, 3], heads[-_GROUPS:])
    assert not pool[0, :, -1].any()


def test_blocks(pool: torch.Tensor, device: torch.device) -> None:
    ids = torch.tensor([_FAR - 1], device=device)
    data = randn(1, 1, _LAYERS, 2, _BLOCK_SIZE, _DIM, dtype=torch.bfloat16).to(device)
    KERNELS.unpack_blocks(data, pool, ids, _GROUPS - 1)
    assert torch.equal(pool[_FAR - 1, _GROUPS - 1], data[0, 0])
    assert torch.equal(KERNELS.pack_blocks(pool, ids, _GROUPS - 1, _GROUPS), data)
    got = KERNELS.block_digest(pool, ids, ids)
    near = pool[_FAR - 1 : _FAR].cpu()
    assert torch.equal(got.cpu(), reference.block_digest(near, torch.tensor([0]), ids.cpu()))
