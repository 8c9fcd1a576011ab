from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRef(_message.Message):
    __slots__ = ("id", "incarnation", "address")
    ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    id: str
    incarnation: int
    address: str
    def __init__(self, id: _Optional[str] = ..., incarnation: _Optional[int] = ..., address: _Optional[str] = ...) -> None: ...

class KVGroup(_message.Message):
    __slots__ = ("layers", "heads", "head_dim", "dtype")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    heads: int
    head_dim: int
    dtype: str
    def __init__(self, layers: _Optional[int] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("block_size", "groups")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    groups: _containers.RepeatedCompositeFieldContainer[KVGroup]
    def __init__(self, block_size: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[KVGroup, _Mapping]]] = ...) -> None: ...

class KVRegion(_message.Message):
    __slots__ = ("address", "num_blocks", "block_bytes", "head_start", "head_stop", "device", "num_trial_blocks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HEAD_START_FIELD_NUMBER: _ClassVar[int]
    HEAD_STOP_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_TRIAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    address: int
    num_blocks: int
    block_bytes: int
    head_start: int
    head_stop: int
    device: str
    num_trial_blocks: int
    def __init__(self, address: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., head_start: _Optional[int] = ..., head_stop: _Optional[int] = ..., device: _Optional[str] = ..., num_trial_blocks: _Optional[int] = ...) -> None: ...

class TransportRank(_message.Message):
    __slots__ = ("agent", "metadata", "region", "host")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    agent: str
    metadata: bytes
    region: KVRegion
    host: str
    def __init__(self, agent: _Optional[str] = ..., metadata: _Optional[bytes] = ..., region: _Optional[_Union[KVRegion, _Mapping]] = ..., host: _Optional[str] = ...) -> None: ...

class TransportPeer(_message.Message):
    __slots__ = ("worker", "layout", "ranks")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerRef
    layout: KVLayout
    ranks: _containers.RepeatedCompositeFieldContainer[TransportRank]
    def __init__(self, worker: _Optional[_Union[WorkerRef, _Mapping]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., ranks: _Optional[_Iterable[_Union[TransportRank, _Mapping]]] = ...) -> None: ...

class HandoffKey(_message.Message):
    __slots__ = ("handoff", "attempt")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    attempt: int
    def __init__(self, handoff: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class StreamHandoffRequest(_message.Message):
    __slots__ = ("consumer", "fingerprint", "follow", "renew", "release", "sequence", "take", "taken", "prefix_request")
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    PREFIX_REQUEST_FIELD_NUMBER: _ClassVar[int]
    consumer: WorkerRef
    fingerprint: str
    follow: _containers.RepeatedCompositeFieldContainer[HandoffKey]
    renew: _containers.RepeatedCompositeFieldContainer[HandoffKey]
    release: _containers.RepeatedCompositeFieldContainer[HandoffKey]
    sequence: int
    take: _containers.RepeatedCompositeFieldContainer[PullRemainder]
    taken: _containers.RepeatedCompositeFieldContainer[HandoffKey]
    prefix_request: _containers.RepeatedCompositeFieldContainer[RemotePrefixRequest]
    def __init__(self, consumer: _Optional[_Union[WorkerRef, _Mapping]] = ..., fingerprint: _Optional[str] = ..., follow: _Optional[_Iterable[_Union[HandoffKey, _Mapping]]] = ..., renew: _Optional[_Iterable[_Union[HandoffKey, _Mapping]]] = ..., release: _Optional[_Iterable[_Union[HandoffKey, _Mapping]]] = ..., sequence: _Optional[int] = ..., take: _Optional[_Iterable[_Union[PullRemainder, _Mapping]]] = ..., taken: _Optional[_Iterable[_Union[HandoffKey, _Mapping]]] = ..., prefix_request: _Optional[_Iterable[_Union[RemotePrefixRequest, _Mapping]]] = ...) -> None: ...

class RemotePrefixRequest(_message.Message):
    __slots__ = ("key", "first_index", "hashes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    first_index: int
    hashes: bytes
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., first_index: _Optional[int] = ..., hashes: _Optional[bytes] = ...) -> None: ...

class PullRemainder(_message.Message):
    __slots__ = ("key", "num_output_tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    num_output_tokens: int
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., num_output_tokens: _Optional[int] = ...) -> None: ...

class OfferedBlock(_message.Message):
    __slots__ = ("block", "digests")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    block: int
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block: _Optional[int] = ..., digests: _Optional[_Iterable[int]] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("key", "first_index", "blocks", "num_computed", "first_tokens", "num_cached", "moving", "last")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    first_index: int
    blocks: _containers.RepeatedCompositeFieldContainer[OfferedBlock]
    num_computed: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[SampledToken]
    num_cached: int
    moving: bool
    last: bool
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., first_index: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[OfferedBlock, _Mapping]]] = ..., num_computed: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[SampledToken, _Mapping]]] = ..., num_cached: _Optional[int] = ..., moving: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class HandoffEnded(_message.Message):
    __slots__ = ("key", "kind", "message")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    key: HandoffKey
    kind: str
    message: str
    def __init__(self, key: _Optional[_Union[HandoffKey, _Mapping]] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class StreamHandoffUpdate(_message.Message):
    __slots__ = ("announcements", "ended", "renewed_sequence", "lease_ms")
    ANNOUNCEMENTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RENEWED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    announcements: _containers.RepeatedCompositeFieldContainer[Announcement]
    ended: _containers.RepeatedCompositeFieldContainer[HandoffEnded]
    renewed_sequence: int
    lease_ms: int
    def __init__(self, announcements: _Optional[_Iterable[_Union[Announcement, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[HandoffEnded, _Mapping]]] = ..., renewed_sequence: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("id", "logprob", "top_ids", "top_logprobs")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...
