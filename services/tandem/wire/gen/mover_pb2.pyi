from tandem.wire.gen import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoverCommand(_message.Message):
    __slots__ = ("read", "connect", "cancel", "teardown", "busy", "self_test", "halt")
    READ_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    TEARDOWN_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    SELF_TEST_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    read: ReadOrder
    connect: _kv_pb2.TransportPeer
    cancel: int
    teardown: TeardownPeer
    busy: bool
    self_test: SelfTest
    halt: Halt
    def __init__(self, read: _Optional[_Union[ReadOrder, _Mapping]] = ..., connect: _Optional[_Union[_kv_pb2.TransportPeer, _Mapping]] = ..., cancel: _Optional[int] = ..., teardown: _Optional[_Union[TeardownPeer, _Mapping]] = ..., busy: _Optional[bool] = ..., self_test: _Optional[_Union[SelfTest, _Mapping]] = ..., halt: _Optional[_Union[Halt, _Mapping]] = ...) -> None: ...

class SelfTest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Halt(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadOrder(_message.Message):
    __slots__ = ("id", "blocks", "local", "logical", "checked", "source")
    ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    LOGICAL_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    id: int
    blocks: _containers.RepeatedCompositeFieldContainer[_kv_pb2.OfferedBlock]
    local: _containers.RepeatedScalarFieldContainer[int]
    logical: _containers.RepeatedScalarFieldContainer[int]
    checked: bool
    source: _kv_pb2.WorkerRef
    def __init__(self, id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[_kv_pb2.OfferedBlock, _Mapping]]] = ..., local: _Optional[_Iterable[int]] = ..., logical: _Optional[_Iterable[int]] = ..., checked: _Optional[bool] = ..., source: _Optional[_Union[_kv_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class TeardownPeer(_message.Message):
    __slots__ = ("peer", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.TransportPeer
    reason: str
    def __init__(self, peer: _Optional[_Union[_kv_pb2.TransportPeer, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class MoverEvent(_message.Message):
    __slots__ = ("done", "failed", "connected", "connect_failed", "lost", "drained", "self_test_done", "stopped")
    DONE_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CONNECT_FAILED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    SELF_TEST_DONE_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    done: ReadDone
    failed: ReadFailed
    connected: _kv_pb2.TransportPeer
    connect_failed: ConnectFailed
    lost: PeerLost
    drained: _kv_pb2.TransportPeer
    self_test_done: SelfTestDone
    stopped: MoverStopped
    def __init__(self, done: _Optional[_Union[ReadDone, _Mapping]] = ..., failed: _Optional[_Union[ReadFailed, _Mapping]] = ..., connected: _Optional[_Union[_kv_pb2.TransportPeer, _Mapping]] = ..., connect_failed: _Optional[_Union[ConnectFailed, _Mapping]] = ..., lost: _Optional[_Union[PeerLost, _Mapping]] = ..., drained: _Optional[_Union[_kv_pb2.TransportPeer, _Mapping]] = ..., self_test_done: _Optional[_Union[SelfTestDone, _Mapping]] = ..., stopped: _Optional[_Union[MoverStopped, _Mapping]] = ...) -> None: ...

class ReadDone(_message.Message):
    __slots__ = ("id", "num_bytes", "seconds")
    ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    id: int
    num_bytes: int
    seconds: float
    def __init__(self, id: _Optional[int] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ReadFailed(_message.Message):
    __slots__ = ("id", "kind", "reason", "drained")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: str
    reason: str
    drained: bool
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[str] = ..., reason: _Optional[str] = ..., drained: _Optional[bool] = ...) -> None: ...

class ConnectFailed(_message.Message):
    __slots__ = ("peer", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.TransportPeer
    reason: str
    def __init__(self, peer: _Optional[_Union[_kv_pb2.TransportPeer, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class PeerLost(_message.Message):
    __slots__ = ("peer", "proven", "reason")
    PEER_FIELD_NUMBER: _ClassVar[int]
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer: _kv_pb2.TransportPeer
    proven: bool
    reason: str
    def __init__(self, peer: _Optional[_Union[_kv_pb2.TransportPeer, _Mapping]] = ..., proven: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class SelfTestDone(_message.Message):
    __slots__ = ("error", "seconds")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    error: str
    seconds: float
    def __init__(self, error: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class MoverStopped(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...
