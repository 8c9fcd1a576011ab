"""The digest of a model's weights and all else its KV depends on; never reads a tensor's meaning.

A digest is over the bytes of all weight files. Imported models carry theirs in a file beside the weights; for other
directories it is computed once and kept in the cache, by the files' paths, sizes and times.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tandem.core.bundle import TokenizerBundle
from tandem.core.config import ModelConfig
from tandem.kv.layout import KVLayout, ModelFingerprint
from tandem.runtime.checkpoint import weight_files
from tandem.runtime.model_config import DecoderConfig

DIGEST_FILE = "weights.digest"
_CHUNK_BYTES = 1 << 22


def model_fingerprint(
    weights_digest: str,
    config: DecoderConfig,
    model: ModelConfig,
    bundle: TokenizerBundle,
    layout: KVLayout,
    arithmetic: str = "",
) -> ModelFingerprint:
    """What partners must agree on. KV mostly has the dtype of the activations, which then stands for both."""
    dtype = layout.group.dtype
    return ModelFingerprint(
        weights_digest=weights_digest,
        quantization=model.quantization,
        kv_dtype=dtype if dtype == model.dtype else f"{dtype} of {model.dtype}",
        rope=str(config.rope),
        tokenizer_digest=bundle.tokenizer_digest,
        block_size=layout.block_size,
        arithmetic=arithmetic,
    )


def weights_digest(directory: Path, cache_dir: Path) -> str:
    """BLAKE2b over names and bytes of the weight files, hexadecimal."""
    written = directory / DIGEST_FILE
    if written.is_file():
        return written.read_text(encoding="ascii").strip()
    files = weight_files(directory)
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.blake2b(json.dumps(stats).encode(), digest_size=16).hexdigest()
    kept = cache_dir / "digests" / key
    if kept.is_file():
        return kept.read_text(encoding="ascii").strip()
    digest = digest_files(files)
    kept.parent.mkdir(parents=True, exist_ok=True)
    temporary = kept.with_suffix(f".{os.getpid()}")
    temporary.write_text(digest, encoding="ascii")
    temporary.replace(kept)
    return digest


def digest_files(files: Sequence[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
