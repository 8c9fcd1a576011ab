from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RankCommand(_message.Message):
    __slots__ = ("spill", "fill", "copy", "clear", "digest", "forward", "logits", "mover")
    SPILL_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    MOVER_FIELD_NUMBER: _ClassVar[int]
    spill: BlockCopies
    fill: BlockCopies
    copy: BlockCopies
    clear: ClearBlocks
    digest: DigestBlocks
    forward: ForwardBatch
    logits: int
    mover: bytes
    def __init__(self, spill: _Optional[_Union[BlockCopies, _Mapping]] = ..., fill: _Optional[_Union[BlockCopies, _Mapping]] = ..., copy: _Optional[_Union[BlockCopies, _Mapping]] = ..., clear: _Optional[_Union[ClearBlocks, _Mapping]] = ..., digest: _Optional[_Union[DigestBlocks, _Mapping]] = ..., forward: _Optional[_Union[ForwardBatch, _Mapping]] = ..., logits: _Optional[int] = ..., mover: _Optional[bytes] = ...) -> None: ...

class RankEvent(_message.Message):
    __slots__ = ("joining", "loaded", "failed", "mover")
    JOINING_FIELD_NUMBER: _ClassVar[int]
    LOADED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    MOVER_FIELD_NUMBER: _ClassVar[int]
    joining: int
    loaded: int
    failed: RankFailure
    mover: bytes
    def __init__(self, joining: _Optional[int] = ..., loaded: _Optional[int] = ..., failed: _Optional[_Union[RankFailure, _Mapping]] = ..., mover: _Optional[bytes] = ...) -> None: ...

class BlockCopies(_message.Message):
    __slots__ = ("sources", "targets")
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    sources: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sources: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ...) -> None: ...

class ClearBlocks(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class DigestBlocks(_message.Message):
    __slots__ = ("blocks", "indices")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedScalarFieldContainer[int]
    indices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, blocks: _Optional[_Iterable[int]] = ..., indices: _Optional[_Iterable[int]] = ...) -> None: ...

class ForwardBatch(_message.Message):
    __slots__ = ("num_rows", "num_sequences", "num_blocks", "num_decodes", "max_rows")
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    num_rows: int
    num_sequences: int
    num_blocks: int
    num_decodes: int
    max_rows: int
    def __init__(self, num_rows: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_decodes: _Optional[int] = ..., max_rows: _Optional[int] = ...) -> None: ...

class RankFailure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
