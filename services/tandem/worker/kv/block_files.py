"""Keep KV blocks in files of one directory, each in a file of its own, and delete those that were used least recently.

A file is written under a temporary name and renamed, so that a process that is killed leaves no incomplete file under a
block's name. A file begins with a header that names its block and holds the digests of its content, which the reader
compares with what it read; so a file that a crash of the machine or a full disk cut short is found and deleted. Several
processes may use one directory; each scans it from time to time for changes by the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.core.ids import BlockHash
from tandem.kv.hashing import HASH_BYTES

HEADER_BYTES = 4096
"""Size of a header: a page, so that the block behind it is aligned."""
SUFFIX = ".kv"
STALE_S = 600.0
"""Age in seconds from which a file with a temporary name is deleted, because the process that wrote it was killed."""
FORMAT = "v1"
"""Version of the format, a part of the directory's name."""
_MAGIC = b"TANDEMKV"
_HEAD = struct.Struct(f"<8sQQ{HASH_BYTES}s")
_MAX_DIGESTS = (HEADER_BYTES - _HEAD.size) // 8


class FileChanges(NamedTuple):
    """Hold the changes that one call of `BlockFiles` makes to the set of blocks that have a file, as far as this
    process knows that set.

    `added`: hashes of the blocks of which the call has written or found a file. `removed`: hashes of the blocks whose
    files the call has deleted, has not found any more, or has put out of use.
    """

    added: Sequence[BlockHash] = ()
    removed: Sequence[BlockHash] = ()


class BlockFiles:
    """Write, read, list and delete the files that hold one model's KV blocks in `directory`, which is created when
    needed.

    `block_bytes`: size of a block in bytes. `num_digests`: number of digests of a block, one per KV head. `max_bytes`:
    limit on the size of all files together, in bytes. Any thread may read at any time; only one thread at a time may
    write and scan. Raises ValueError if `max_bytes` is smaller than one file.
    """

    def __init__(self, directory: Path, block_bytes: int, num_digests: int, max_bytes: int) -> None:
        self.directory = directory
        self._block_bytes = block_bytes
        self._num_digests = num_digests
        self._max_files = max_bytes // (HEADER_BYTES + block_bytes)
        if self._max_files < 1 or num_digests > _MAX_DIGESTS:
            raise ValueError(f"a file of {HEADER_BYTES + block_bytes} bytes does not fit into {max_bytes} bytes")
        # The time of the last use of each file as far as this process knows, in nanoseconds, oldest first.
        self._used_ns: OrderedDict[BlockHash, int] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._used_ns)

    def __repr__(self) -> str:
        return f"<{len(self)} of at most {self._max_files} block files in {self.directory}>"

    def read(self, block_hash: BlockHash, into: memoryview) -> tuple[int, ...] | None:
        """Read a block from its file into `into`, and return the digests in the file's header, which the caller
        compares with the content. Returns None if there is no file, or if the file has a wrong size or header; a wrong
        file is deleted. Raises OSError where the file system fails."""
        try:
            file = os.open(self._path(block_hash), os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            header = bytearray(HEADER_BYTES)
            is_complete = os.fstat(file).st_size == HEADER_BYTES + len(into)
            num_bytes = os.preadv(file, [header, into], 0) if is_complete else 0
            if num_bytes != HEADER_BYTES + len(into) or _HEAD.unpack_from(header) != self._head(block_hash):
                self.discard(block_hash)
                return None
            return struct.unpack_from(f"<{self._num_digests}Q", header, _HEAD.size)
        finally:
            os.close(file)

    def write(self, block_hash: BlockHash, content: memoryview, digests: Sequence[int]) -> FileChanges:
        """Write a block with its digests to its file, and delete the least recently used files beyond the limit.
        Returns the changes: the written block as added, and the blocks of deleted files as removed. Raises OSError, and
        leaves no incomplete file, where the block cannot be written."""
        header = bytearray(HEADER_BYTES)
        _HEAD.pack_into(header, 0, *self._head(block_hash))
        struct.pack_into(f"<{self._num_digests}Q", header, _HEAD.size, *digests)
        path = self._path(block_hash)
        self._make_directory()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.stem}.{secrets.token_hex(8)}")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            try:
                if os.pwritev(file, [header, content], 0) != HEADER_BYTES + len(content):
                    raise OSError("the file system took a part of the block only")
                used_ns = os.fstat(file).st_mtime_ns
            finally:
                os.close(file)
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            self._used_ns[block_hash] = used_ns
            self._used_ns.move_to_end(block_hash)
        return FileChanges([block_hash], self._trim())

    def touch(self, hashes: Sequence[BlockHash]) -> None:
        """Record that the blocks of a prefix are used now, in the modification times of their files. The first blocks
        of the prefix count as used last, so that they are deleted last."""
        for block_hash in reversed(hashes):
            path = self._path(block_hash)
            with contextlib.suppress(OSError):  # deleted meanwhile, or a read-only file system
                os.utime(path)
                used_ns = path.stat().st_mtime_ns
                with self._lock:
                    if block_hash in self._used_ns:
                        self._used_ns[block_hash] = used_ns
                        self._used_ns.move_to_end(block_hash)

    def discard(self, block_hash: BlockHash) -> FileChanges:
        """Delete the file of a block, if there is one, and return the change: the block as removed."""
        with contextlib.suppress(OSError):
            self._path(block_hash).unlink()
        return self.forget([block_hash])

    def forget(self, hashes: Sequence[BlockHash]) -> FileChanges:
        """Treat the blocks `hashes` as blocks without a file until they are written again or a scan finds their files,
        and return the change: these blocks as removed. Deletes no file."""
        with self._lock:
            for block_hash in hashes:
                self._used_ns.pop(block_hash, None)
        return FileChanges(removed=hashes)

    def forget_missing(self, hashes: Iterable[BlockHash]) -> FileChanges:
        """Check which of the blocks `hashes` have no file any more, and return the change: the blocks without a file as
        removed."""
        return self.forget([block_hash for block_hash in hashes if self._is_missing(block_hash)])

    def scan(self) -> FileChanges:
        """Read the directory, delete the files beyond the limit and those that a killed process left behind, and return
        the changes: which blocks have gained or lost a file compared with what this process knew before. Raises OSError
        where the file system fails."""
        found = sorted((used_ns, block_hash) for block_hash, used_ns in self._scan_files())
        fresh = OrderedDict((block_hash, used_ns) for used_ns, block_hash in found)
        with self._lock:
            before, self._used_ns = self._used_ns, fresh
            names = set(fresh)
        excess = self._trim()
        known = before.keys() | set(excess)
        added = [block_hash for _, block_hash in found if block_hash not in known]
        return FileChanges(added, [*(name for name in before if name not in names), *excess])

    def _trim(self) -> list[BlockHash]:
        """Delete the files that were used least recently, as many as exceed the limit, and return their blocks."""
        removed: list[BlockHash] = []
        while len(self._used_ns) > self._max_files:
            with self._lock:
                block_hash, used_ns = self._used_ns.popitem(last=False)
            path = self._path(block_hash)
            try:
                newest_ns = path.stat().st_mtime_ns
                if newest_ns > used_ns:  # another process has used it
                    with self._lock:
                        self._used_ns[block_hash] = newest_ns
                    continue
                path.unlink()
            except OSError:
                pass
            removed.append(block_hash)
        return removed

    def _scan_files(self) -> Iterator[tuple[BlockHash, int]]:
        """Yield each block with a file, and the time of its last use in nanoseconds."""
        now_ns = self._file_system_ns()
        for folder in self._folders():
            with os.scandir(folder) as entries:
                for entry in entries:
                    name = entry.name
                    with contextlib.suppress(OSError):  # deleted meanwhile
                        used_ns = entry.stat().st_mtime_ns
                        if name.startswith("."):
                            if now_ns - used_ns > STALE_S * 1e9:
                                os.unlink(entry.path)
                        elif name.endswith(SUFFIX) and len(name) == 2 * HASH_BYTES + len(SUFFIX):
                            with contextlib.suppress(ValueError):
                                yield BlockHash(bytes.fromhex(name.removesuffix(SUFFIX))), used_ns

    def _folders(self) -> list[str]:
        with os.scandir(self.directory) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]

    def _file_system_ns(self) -> int:
        """Return the present time by the file system's clock, in nanoseconds. It may differ from this machine's clock,
        for example on a network file system. Returns 0 where nothing can be written."""
        marker = self.directory / ".clock"
        try:
            self._make_directory()
            marker.touch(mode=0o600)
            return marker.stat().st_mtime_ns
        except OSError:
            return 0

    def _make_directory(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _is_missing(self, block_hash: BlockHash) -> bool:
        try:
            self._path(block_hash).stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def _path(self, block_hash: BlockHash) -> Path:
        name = block_hash.hex()
        return self.directory / name[:2] / f"{name}{SUFFIX}"

    def _head(self, block_hash: BlockHash) -> tuple[bytes, int, int, bytes]:
        return _MAGIC, self._num_digests, self._block_bytes, block_hash
