"""Compute a model's fingerprint: a digest of its weights, and every setting that its KV depends on.

The digest covers the bytes of all weight files. An imported model has it in a file beside the weights. For other
directories it is computed once and cached, keyed by the files' paths, sizes and modification times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import ModelConfig
from tandem.kv.layout import KVLayout, ModelFingerprint
from tandem.runtime.architectures.spec import DecoderSpec
from tandem.runtime.checkpoint import weight_files

DIGEST_FILE = "weights.digest"
_CHUNK_BYTES = 1 << 22


def model_fingerprint(
    weights_digest: str,
    config: DecoderSpec,
    model: ModelConfig,
    bundle: TokenizerBundle,
    layout: KVLayout,
    arithmetic: str = "",
) -> ModelFingerprint:
    """Build the fingerprint of a loaded model; two workers exchange KV only if their fingerprints are equal.

    `weights_digest`: result of the function `weights_digest`. `config`, `model`: the model's architecture and its
    settings. `bundle`: its tokenizer files. `layout`: layout of its KV blocks. `arithmetic`: text that names what the
    bits of batch-invariant results depend on; empty if results are not batch-invariant. The fingerprint's field
    `kv_dtype` names one dtype if KV and activations share it, else it reads "KV_DTYPE of ACTIVATION_DTYPE"."""
    dtype = layout.group.dtype
    return ModelFingerprint(
        weights_digest=weights_digest,
        quantization=model.quantization,
        kv_dtype=dtype if dtype == model.dtype else f"{dtype} of {model.dtype}",
        architecture=architecture_digest(config),
        tokenizer_digest=bundle.tokenizer_digest,
        block_size=layout.block_size,
        arithmetic=arithmetic,
    )


def architecture_digest(spec: DecoderSpec) -> str:
    """Return a hexadecimal 128-bit digest of those fields of `spec` that determine what the decoder computes.

    The longest context and the ids of begin-of-text and end-of-text tokens are left out."""
    computed = replace(spec, max_length=0, eos_token_ids=frozenset(), bos_token_id=None)
    return hashlib.blake2b(repr(computed).encode(), digest_size=16).hexdigest()


def weights_digest(directory: Path, cache_dir: Path) -> str:
    """Return the hexadecimal digest of the weight files of a model directory, see `digest_files`.

    It is read from `weights.digest` in `directory` if that exists, else from `cache_dir/digests`. If neither has it, it
    is computed, which reads all weights, and written to `cache_dir/digests`. Raises TandemError when a weight file is
    missing."""
    stored = directory / DIGEST_FILE
    if stored.is_file():
        return stored.read_text(encoding="ascii").strip()
    files = weight_files(directory)
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.blake2b(json.dumps(stats).encode(), digest_size=16).hexdigest()
    cached = cache_dir / "digests" / key
    if cached.is_file():
        return cached.read_text(encoding="ascii").strip()
    digest = digest_files(files)
    cached.parent.mkdir(parents=True, exist_ok=True)
    temporary = cached.with_suffix(f".{os.getpid()}")
    temporary.write_text(digest, encoding="ascii")
    temporary.replace(cached)
    return digest


def digest_files(files: Sequence[Path]) -> str:
    """Return the hexadecimal 128-bit BLAKE2b digest over the names, sizes and bytes of `files`, in their order.

    Reads all files, which takes seconds for large weights."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
