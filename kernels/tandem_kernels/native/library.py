"""Bind the compiled library with ctypes as typed Python calls on tensors.

Tensors must be contiguous float32 in host memory, indices int64 or int32 as stated. Any other tensor raises ValueError
before the call, because the library trusts its pointers. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from enum import IntEnum
from functools import cache

import torch

from tandem_kernels.contract import AttentionBatch, digest_words
from tandem_kernels.native.build import NativeUnavailable, library_file
from tandem_kernels.native.pack_codes import PackedMatrix


class Into(IntEnum):
    """What a linear layer does with its product: store it, add it, or apply SwiGLU (see `gate_up_rows`) and store the
    result."""

    STORE = 0
    ADD = 1
    SWIGLU = 2


MAX_SCALE_PARTS = 4
"""Greatest number of parts that scales have; equals kScaleParts of panel.hpp."""


class CMatrix(Structure):
    """Packed weights as the C struct `Matrix` of panel.hpp. `packed` keeps the tensors alive that the fields point
    to."""

    packed: tuple[PackedMatrix, torch.Tensor | None] | None = None
    _fields_ = (
        ("coding", c_int),
        ("scaling", c_int),
        ("panels", c_void_p),
        ("scales", c_void_p * MAX_SCALE_PARTS),
        ("bias", c_void_p),
        *((name, c_int) for name in ("n", "k", "group")),
        ("offset", c_float),
        ("first_panel", c_int),
    )


class CShape(Structure):
    """Sizes of a model as the C struct `Shape` of decoder.hpp."""

    _fields_ = (
        *((name, c_int) for name in ("hidden", "heads", "kv_heads", "head_dim", "layers", "vocab", "has_row_norms")),
        *(
            (name, c_float)
            for name in ("eps", "attention_scale", "embedding_multiplier", "residual_multiplier", "logits_divisor")
        ),
    )


class CExpertRouting(Structure):
    """A routing as the C struct `ExpertRouting` of experts.hpp."""

    _fields_ = (
        ("num_chosen", c_int),
        ("scores", c_int),
        ("is_normalised", c_int),
        ("scaling", c_float),
        ("num_groups", c_int),
        ("num_chosen_groups", c_int),
    )


class CExperts(Structure):
    """A mixture of experts as the C struct `Experts` of experts.hpp. A `count` of 0: the layer's MLP is dense."""

    _fields_ = (
        ("count", c_int),
        ("inner", c_int),
        ("routing", CExpertRouting),
        ("router", CMatrix),
        ("choice_bias", c_void_p),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("shared_inner", c_int),
        ("shared_gate_up", CMatrix),
        ("shared_down", CMatrix),
        ("shared_gate", c_void_p),
        ("tokens", c_void_p),
    )


class CLayer(Structure):
    """Weights of one layer as the C struct `Layer` of decoder.hpp."""

    _fields_ = (
        ("has_rope", c_int),
        ("attention_norm", c_void_p),
        ("qkv", CMatrix * 3),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", CMatrix),
        ("after_attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("inner", c_int),
        ("gate_up", CMatrix),
        ("down", CMatrix),
        ("experts", CExperts),
        ("after_mlp_norm", c_void_p),
    )


class CDecoder(Structure):
    """Weights of a model as the C struct `DecoderSpec` of exports.cpp."""

    _fields_ = (
        ("shape", CShape),
        ("layers", POINTER(CLayer)),
        ("norm", c_void_p),
        ("head", CMatrix),
        ("embeddings", CMatrix),
        ("quantizes_rows", c_int),
    )


class CPool(Structure):
    """A KV pool as the C struct `Pool` of attention.hpp."""

    _fields_ = (
        ("base", c_void_p),
        *((name, c_int) for name in ("kv_heads", "layers", "block_size", "head_dim")),
    )


class CRows(Structure):
    """A batch's rows and block tables as the C struct `Rows` of attention.hpp."""

    _fields_ = (
        ("query_starts", c_void_p),
        ("context_lens", c_void_p),
        ("tables", c_void_p),
        ("table_width", c_int),
        ("sequences", c_int),
    )


class CStep(Structure):
    """Inputs and outputs of one step as the C struct `Step` of decoder.hpp."""

    _fields_ = (
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("num_rows", c_int),
        ("sequences", CRows),
        ("pool", CPool),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "tandem_vector_width": (c_int, ()),
    "tandem_team_new": (c_void_p, (c_int,)),
    "tandem_team_delete": (None, (c_void_p,)),
    "tandem_decoder_new": (c_void_p, (POINTER(CDecoder),)),
    "tandem_decoder_delete": (None, (c_void_p,)),
    "tandem_decoder_buffer_bytes": (c_size_t, (c_void_p,)),
    "tandem_decoder_forward": (c_char_p, (c_void_p, c_void_p, POINTER(CStep), c_void_p)),
    "tandem_decoder_logits": (c_char_p, (c_void_p, c_void_p, c_void_p, c_int, c_void_p)),
    "tandem_linear": (None, (c_void_p, c_void_p, c_int, c_int, POINTER(CMatrix), c_void_p, c_int, c_int)),
    "tandem_embed": (None, (POINTER(CMatrix), c_void_p, c_int, c_void_p)),
    "tandem_attention": (
        c_char_p,
        (c_void_p, c_void_p, c_int, POINTER(CPool), c_int, POINTER(CRows), c_int, c_float, c_void_p, c_int),
    ),
    "tandem_rms_norm": (None, (c_void_p, c_void_p, c_float, c_int, c_int, c_void_p)),
    "tandem_block_digest": (None, (c_void_p, c_int64, c_int, c_int, c_void_p, c_void_p, c_int, c_void_p)),
}


@cache
def load() -> ctypes.CDLL:
    """Load the library of this machine, building it on first use. Raises NativeUnavailable."""
    try:
        library = ctypes.CDLL(str(library_file()))
    except OSError as error:
        raise NativeUnavailable(f"the compiled kernels cannot be loaded: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def vector_width() -> int:
    """Return the number of floats in a vector register as the library was compiled."""
    return int(load().tandem_vector_width())


def address(tensor: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> int | None:
    """Return the address of a tensor's data; None for None.

    Raises ValueError unless the tensor is contiguous, of type `dtype` and in host memory."""
    if tensor is None:
        return None
    if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"expected contiguous {dtype} in host memory, got {tensor.dtype}, strides {tensor.stride()}")
    return tensor.data_ptr()


def check(error: bytes | None) -> None:
    """Raise RuntimeError with the message `error` that a library call returned; do nothing when it is None."""
    if error is not None:
        raise RuntimeError(error.decode())


def release_with(owner: object, delete: Callable[[int], None], handle: int) -> None:
    """Delete the object behind `handle` when `owner` is garbage-collected, but not at process exit.

    At exit a daemon thread may still run a kernel, and the operating system frees the memory anyway."""
    weakref.finalize(owner, delete, handle).atexit = False


class Team:
    """Own a pool of `size` threads, the caller's included, that run a kernel together.

    Only one kernel may run at a time.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a team has at least one thread, not {size}")
        self.size = size
        self.handle = load().tandem_team_new(size)
        if not self.handle:
            raise RuntimeError(f"{size} threads could not be started")
        release_with(self, load().tandem_team_delete, self.handle)

    def __repr__(self) -> str:
        return f"Team({self.size})"


def rows_of(batch: AttentionBatch) -> CRows:
    """Return the rows and block tables of a batch as the struct that the library reads, which is valid as long as
    `batch` lives. Raises ValueError where its tensors are not contiguous int32 in host memory."""
    return CRows(
        address(batch.query_starts, torch.int32),
        address(batch.context_lens, torch.int32),
        address(batch.block_tables, torch.int32),
        batch.block_tables.shape[1] if batch.num_sequences else 0,
        batch.num_sequences,
    )


def pool_of(pool: torch.Tensor) -> CPool:
    """Return the KV pool of all layers, `[N, G, L, 2, B, D]`, as the struct that the library reads, which is valid as
    long as `pool` lives. Raises ValueError where the pool is not contiguous float32 in host memory."""
    _, heads, layers, _, block_size, head_dim = pool.shape
    return CPool(address(pool), heads, layers, block_size, head_dim)


def matrix_of(packed: PackedMatrix, n: int, k: int, bias: torch.Tensor | None = None) -> CMatrix:
    """Return packed weights `[n, k]` as the struct that the library reads; it keeps its tensors alive."""
    panels = address(packed.panels, packed.panels.dtype)
    found = packed.format
    if found is None:
        coding = _FLOAT if packed.panels.dtype == torch.float32 else _BFLOAT
        matrix = CMatrix(coding=coding, panels=panels, bias=address(bias), n=n, k=k)
    else:
        parts = (c_void_p * MAX_SCALE_PARTS)(*(address(part, part.dtype) for part in packed.scales))
        matrix = CMatrix(
            found.numbers, found.scales, panels, parts, address(bias), n, k, found.group, float(found.offset)
        )
    matrix.packed = (packed, bias)
    return matrix


_FLOAT, _BFLOAT = 0, 1
"""Values of `Coding` of panel.hpp for weights that are floats."""


def linear(team: Team, x: torch.Tensor, weights: CMatrix, into: Into, y: torch.Tensor) -> torch.Tensor:
    """Compute the product `y = x W^T` in float32 for weights of any format, plus their bias if they have one.

    `team`: the threads that compute it. `x` is `[m, k]`. `into`: whether the product is stored in `y` or added to it,
    or its SwiGLU is stored. Writes and returns `y`, `[m, n]`, or `[m, n / 2]` for `Into.SWIGLU`.
    """
    load().tandem_linear(team.handle, address(x), x.shape[1], len(x), byref(weights), address(y), y.shape[1], int(into))
    return y


def embed(table: CMatrix, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rows of a packed embedding table with the indices `tokens` (int64 `[T]`), as float32 `[T, k]`."""
    out = torch.empty((len(tokens), table.k))
    load().tandem_embed(byref(table), address(tokens, torch.int64), len(tokens), address(out))
    return out


def paged_attention(
    team: Team, query: torch.Tensor, pool: torch.Tensor, layer: int, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """Return the causal attention `[T, H, D]` of query rows to their sequences' KV, as `paged_attention` in
    `tandem_kernels.contract` defines it.

    `team`: the threads that compute it. `query`: float32 `[T, H, D]`. `pool`: the KV pool of all layers, `[N, G, L, 2,
    B, D]`, of which layer `layer` is read. `batch`: which rows and blocks belong to which sequence. `scale`: factor on
    the query-key products. Raises ValueError where H is no multiple of G or D is no multiple of 4, and RuntimeError
    where the library fails."""
    heads, head_dim = query.shape[1:]
    if heads % pool.shape[1] or head_dim % 4:
        raise ValueError(f"{heads} query heads of {head_dim} over {pool.shape[1]} KV heads")
    out = torch.empty_like(query)
    width = heads * head_dim
    check(
        load().tandem_attention(
            team.handle, address(query), width, byref(pool_of(pool)), layer, byref(rows_of(batch)), heads,
            scale, address(out), width,
        )
    )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x` divided by its root mean square over the last dimension and multiplied by `weight`, as `rms_norm` in
    `tandem_kernels.contract` defines it. `eps` is added to the mean square."""
    width = x.shape[-1]
    out = torch.empty_like(x)
    load().tandem_rms_norm(address(x), address(weight), eps, x.numel() // width, width, address(out))
    return out


def block_digest(
    pool: torch.Tensor, block_ids: torch.Tensor, block_indices: torch.Tensor, *, head_start: int = 0
) -> torch.Tensor:
    """Return the digests `[n, G]` of the KV heads of blocks `block_ids`, as `block_digest` in `tandem_kernels.contract`
    defines them. Raises ValueError like `digest_words`."""
    words = digest_words(pool)
    out = torch.empty((len(block_ids), pool.shape[1]), dtype=torch.int64)
    load().tandem_block_digest(
        address(pool, pool.dtype), words, pool.shape[1], head_start, address(block_ids, torch.int64),
        address(block_indices, torch.int64), len(block_ids), address(out, torch.int64),
    )  # fmt: skip
    return out
