from tandem.wire.gen import kv_pb2 as _kv_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobKey(_message.Message):
    __slots__ = ("request", "attempt", "choice")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request: str
    attempt: int
    choice: int
    def __init__(self, request: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop_token_ids", "logprobs", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "min_tokens", "grammar")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[TokenBias]
    min_tokens: int
    grammar: Grammar
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[TokenBias, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class TokenBias(_message.Message):
    __slots__ = ("token", "bias")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token: int
    bias: float
    def __init__(self, token: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "source")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class RemotePrefix(_message.Message):
    __slots__ = ("handoff", "source", "num_blocks")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    source: _kv_pb2.WorkerRef
    num_blocks: int
    def __init__(self, handoff: _Optional[str] = ..., source: _Optional[_Union[_kv_pb2.WorkerRef, _Mapping]] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class GenerateJob(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: RemotePrefix
    def __init__(self, prefix: _Optional[_Union[RemotePrefix, _Mapping]] = ...) -> None: ...

class PrefillJob(_message.Message):
    __slots__ = ("handoff", "prefix")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    prefix: RemotePrefix
    def __init__(self, handoff: _Optional[str] = ..., prefix: _Optional[_Union[RemotePrefix, _Mapping]] = ...) -> None: ...

class ResumeJob(_message.Message):
    __slots__ = ("handoff", "source", "offer_attempt")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OFFER_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    handoff: str
    source: _kv_pb2.WorkerRef
    offer_attempt: int
    def __init__(self, handoff: _Optional[str] = ..., source: _Optional[_Union[_kv_pb2.WorkerRef, _Mapping]] = ..., offer_attempt: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("gateway", "key", "model", "prompt_tokens", "output_tokens", "sampling", "priority", "cache_salt", "generate", "prefill", "resume", "incarnation", "lane", "tenant", "num_choices", "prompt_logprobs", "traceparent", "retain_ms", "max_retained_tokens")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NUM_CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    RETAIN_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    key: JobKey
    model: str
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    priority: int
    cache_salt: str
    generate: GenerateJob
    prefill: PrefillJob
    resume: ResumeJob
    incarnation: int
    lane: int
    tenant: str
    num_choices: int
    prompt_logprobs: int
    traceparent: str
    retain_ms: int
    max_retained_tokens: int
    def __init__(self, gateway: _Optional[str] = ..., key: _Optional[_Union[JobKey, _Mapping]] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., generate: _Optional[_Union[GenerateJob, _Mapping]] = ..., prefill: _Optional[_Union[PrefillJob, _Mapping]] = ..., resume: _Optional[_Union[ResumeJob, _Mapping]] = ..., incarnation: _Optional[int] = ..., lane: _Optional[int] = ..., tenant: _Optional[str] = ..., num_choices: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., traceparent: _Optional[str] = ..., retain_ms: _Optional[int] = ..., max_retained_tokens: _Optional[int] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ("refusal", "load")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    load: Load
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[JobKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[JobKey, _Mapping]]] = ...) -> None: ...

class CancelReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferMigrationRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[JobKey]
    def __init__(self, keys: _Optional[_Iterable[_Union[JobKey, _Mapping]]] = ...) -> None: ...

class OfferMigrationReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("gateway", "positions")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    gateway: str
    positions: _containers.RepeatedCompositeFieldContainer[WatchPosition]
    def __init__(self, gateway: _Optional[str] = ..., positions: _Optional[_Iterable[_Union[WatchPosition, _Mapping]]] = ...) -> None: ...

class WatchPosition(_message.Message):
    __slots__ = ("key", "next_index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    key: JobKey
    next_index: int
    def __init__(self, key: _Optional[_Union[JobKey, _Mapping]] = ..., next_index: _Optional[int] = ...) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ("key", "first_index", "tokens", "num_cached_tokens", "stages", "num_pauses", "paused_s", "yielded_sequences", "yielded_tokens", "yielded_blocks")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_PAUSES_FIELD_NUMBER: _ClassVar[int]
    PAUSED_S_FIELD_NUMBER: _ClassVar[int]
    YIELDED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    YIELDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    YIELDED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    key: JobKey
    first_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[_kv_pb2.SampledToken]
    num_cached_tokens: int
    stages: JobStages
    num_pauses: int
    paused_s: float
    yielded_sequences: _containers.RepeatedScalarFieldContainer[int]
    yielded_tokens: _containers.RepeatedScalarFieldContainer[int]
    yielded_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, key: _Optional[_Union[JobKey, _Mapping]] = ..., first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_kv_pb2.SampledToken, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., stages: _Optional[_Union[JobStages, _Mapping]] = ..., num_pauses: _Optional[int] = ..., paused_s: _Optional[float] = ..., yielded_sequences: _Optional[_Iterable[int]] = ..., yielded_tokens: _Optional[_Iterable[int]] = ..., yielded_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class JobStages(_message.Message):
    __slots__ = ("prefill_queue_s", "prefill_s", "transfer_s", "decode_queue_s", "decode_s", "wait_stages", "wait_causes", "waits_s", "num_tokens_ahead")
    PREFILL_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_STAGES_FIELD_NUMBER: _ClassVar[int]
    WAIT_CAUSES_FIELD_NUMBER: _ClassVar[int]
    WAITS_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_AHEAD_FIELD_NUMBER: _ClassVar[int]
    prefill_queue_s: float
    prefill_s: float
    transfer_s: float
    decode_queue_s: float
    decode_s: float
    wait_stages: _containers.RepeatedScalarFieldContainer[str]
    wait_causes: _containers.RepeatedScalarFieldContainer[str]
    waits_s: _containers.RepeatedScalarFieldContainer[float]
    num_tokens_ahead: int
    def __init__(self, prefill_queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., transfer_s: _Optional[float] = ..., decode_queue_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., wait_stages: _Optional[_Iterable[str]] = ..., wait_causes: _Optional[_Iterable[str]] = ..., waits_s: _Optional[_Iterable[float]] = ..., num_tokens_ahead: _Optional[int] = ...) -> None: ...

class PulledKV(_message.Message):
    __slots__ = ("key", "num_blocks", "num_bytes", "num_cached_tokens", "num_exposed_bytes", "total_seconds", "exposed_seconds", "busy_seconds", "source")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPOSED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    key: JobKey
    num_blocks: int
    num_bytes: int
    num_cached_tokens: int
    num_exposed_bytes: int
    total_seconds: float
    exposed_seconds: float
    busy_seconds: float
    source: _kv_pb2.WorkerRef
    def __init__(self, key: _Optional[_Union[JobKey, _Mapping]] = ..., num_blocks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_exposed_bytes: _Optional[int] = ..., total_seconds: _Optional[float] = ..., exposed_seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., source: _Optional[_Union[_kv_pb2.WorkerRef, _Mapping]] = ...) -> None: ...

class JobEnd(_message.Message):
    __slots__ = ("key", "finished", "failed", "cancelled")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    key: JobKey
    finished: JobFinished
    failed: Refusal
    cancelled: JobCancelled
    def __init__(self, key: _Optional[_Union[JobKey, _Mapping]] = ..., finished: _Optional[_Union[JobFinished, _Mapping]] = ..., failed: _Optional[_Union[Refusal, _Mapping]] = ..., cancelled: _Optional[_Union[JobCancelled, _Mapping]] = ...) -> None: ...

class JobFinished(_message.Message):
    __slots__ = ("reason", "num_output_tokens", "num_cached_tokens")
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    num_output_tokens: int
    num_cached_tokens: int
    def __init__(self, reason: _Optional[str] = ..., num_output_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class JobCancelled(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_queued_tokens", "num_blocks", "num_free_blocks", "num_leased_blocks", "num_reserved_blocks", "draining", "num_drafted_tokens", "num_accepted_tokens", "num_steps_over_target", "lane_tokens", "lane_longest", "num_horizon_tokens", "number", "size_tokens", "size_longest", "num_remote_hit_tokens", "num_prefill_tokens", "num_decode_tokens", "lane_seqs", "lane_blocks", "lane_paused", "num_host_blocks")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_OVER_TARGET_FIELD_NUMBER: _ClassVar[int]
    LANE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LANE_LONGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_HORIZON_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_LONGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_REMOTE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LANE_SEQS_FIELD_NUMBER: _ClassVar[int]
    LANE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LANE_PAUSED_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_leased_blocks: int
    num_reserved_blocks: int
    draining: bool
    num_drafted_tokens: int
    num_accepted_tokens: int
    num_steps_over_target: int
    lane_tokens: _containers.RepeatedScalarFieldContainer[int]
    lane_longest: _containers.RepeatedScalarFieldContainer[int]
    num_horizon_tokens: int
    number: int
    size_tokens: _containers.RepeatedScalarFieldContainer[int]
    size_longest: _containers.RepeatedScalarFieldContainer[int]
    num_remote_hit_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    lane_seqs: _containers.RepeatedScalarFieldContainer[int]
    lane_blocks: _containers.RepeatedScalarFieldContainer[int]
    lane_paused: _containers.RepeatedScalarFieldContainer[int]
    num_host_blocks: int
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_queued_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_leased_blocks: _Optional[int] = ..., num_reserved_blocks: _Optional[int] = ..., draining: _Optional[bool] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_steps_over_target: _Optional[int] = ..., lane_tokens: _Optional[_Iterable[int]] = ..., lane_longest: _Optional[_Iterable[int]] = ..., num_horizon_tokens: _Optional[int] = ..., number: _Optional[int] = ..., size_tokens: _Optional[_Iterable[int]] = ..., size_longest: _Optional[_Iterable[int]] = ..., num_remote_hit_tokens: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., lane_seqs: _Optional[_Iterable[int]] = ..., lane_blocks: _Optional[_Iterable[int]] = ..., lane_paused: _Optional[_Iterable[int]] = ..., num_host_blocks: _Optional[int] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("base_s", "prefill_token_s", "decode_seq_s", "decode_context_s", "prefill_pair_s")
    BASE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_SEQ_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_PAIR_S_FIELD_NUMBER: _ClassVar[int]
    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    decode_context_s: float
    prefill_pair_s: float
    def __init__(self, base_s: _Optional[float] = ..., prefill_token_s: _Optional[float] = ..., decode_seq_s: _Optional[float] = ..., decode_context_s: _Optional[float] = ..., prefill_pair_s: _Optional[float] = ...) -> None: ...

class WatchUpdate(_message.Message):
    __slots__ = ("runs", "pulled", "ends", "load", "step_cost", "scores", "moving", "links", "preempted")
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PULLED_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[TokenRun]
    pulled: _containers.RepeatedCompositeFieldContainer[PulledKV]
    ends: _containers.RepeatedCompositeFieldContainer[JobEnd]
    load: Load
    step_cost: StepCost
    scores: _containers.RepeatedCompositeFieldContainer[PromptScores]
    moving: _containers.RepeatedCompositeFieldContainer[JobMigration]
    links: _containers.RepeatedCompositeFieldContainer[LinkReport]
    preempted: _containers.RepeatedCompositeFieldContainer[JobPreemption]
    def __init__(self, runs: _Optional[_Iterable[_Union[TokenRun, _Mapping]]] = ..., pulled: _Optional[_Iterable[_Union[PulledKV, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[JobEnd, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., scores: _Optional[_Iterable[_Union[PromptScores, _Mapping]]] = ..., moving: _Optional[_Iterable[_Union[JobMigration, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ..., preempted: _Optional[_Iterable[_Union[JobPreemption, _Mapping]]] = ...) -> None: ...

class JobPreemption(_message.Message):
    __slots__ = ("key", "next_index")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    key: JobKey
    next_index: int
    def __init__(self, key: _Optional[_Union[JobKey, _Mapping]] = ..., next_index: _Optional[int] = ...) -> None: ...

class JobMigration(_message.Message):
    __slots__ = ("key", "offer", "requested")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_FIELD_NUMBER: _ClassVar[int]
    key: JobKey
    offer: _kv_pb2.HandoffKey
    requested: bool
    def __init__(self, key: _Optional[_Union[JobKey, _Mapping]] = ..., offer: _Optional[_Union[_kv_pb2.HandoffKey, _Mapping]] = ..., requested: _Optional[bool] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("key", "first_index", "tokens")
    KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    key: JobKey
    first_index: int
    tokens: _containers.RepeatedCompositeFieldContainer[_kv_pb2.SampledToken]
    def __init__(self, key: _Optional[_Union[JobKey, _Mapping]] = ..., first_index: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[_kv_pb2.SampledToken, _Mapping]]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: _kv_pb2.HandoffKey
    def __init__(self, key: _Optional[_Union[_kv_pb2.HandoffKey, _Mapping]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("with_bundle",)
    WITH_BUNDLE_FIELD_NUMBER: _ClassVar[int]
    with_bundle: bool
    def __init__(self, with_bundle: _Optional[bool] = ...) -> None: ...

class TokenizerBundle(_message.Message):
    __slots__ = ("tokenizer_json", "chat_template", "generation_config_json", "special_tokens_json")
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_JSON_FIELD_NUMBER: _ClassVar[int]
    tokenizer_json: bytes
    chat_template: str
    generation_config_json: str
    special_tokens_json: str
    def __init__(self, tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., generation_config_json: _Optional[str] = ..., special_tokens_json: _Optional[str] = ...) -> None: ...

class Books(_message.Message):
    __slots__ = ("num_blocks", "num_free_blocks", "num_cached_blocks", "num_table_blocks", "num_leased_blocks", "num_reading_blocks", "num_quarantined_blocks", "num_sequences", "num_leases", "num_pulls", "num_host_blocks", "num_retained_blocks", "num_file_blocks", "num_file_hit_tokens")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_READING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_PULLS_FIELD_NUMBER: _ClassVar[int]
    NUM_HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETAINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FILE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FILE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_table_blocks: int
    num_leased_blocks: int
    num_reading_blocks: int
    num_quarantined_blocks: int
    num_sequences: int
    num_leases: int
    num_pulls: int
    num_host_blocks: int
    num_retained_blocks: int
    num_file_blocks: int
    num_file_hit_tokens: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_table_blocks: _Optional[int] = ..., num_leased_blocks: _Optional[int] = ..., num_reading_blocks: _Optional[int] = ..., num_quarantined_blocks: _Optional[int] = ..., num_sequences: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_pulls: _Optional[int] = ..., num_host_blocks: _Optional[int] = ..., num_retained_blocks: _Optional[int] = ..., num_file_blocks: _Optional[int] = ..., num_file_hit_tokens: _Optional[int] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("host", "rack", "zone")
    HOST_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    host: str
    rack: str
    zone: str
    def __init__(self, host: _Optional[str] = ..., rack: _Optional[str] = ..., zone: _Optional[str] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("worker", "pool", "model", "fingerprint", "max_model_len", "transport", "bundle_digest", "bundle", "load", "books", "transport_kind", "step_cost", "aliases", "transport_proof", "role", "redis_problem", "num_redis_errors", "topology", "metrics_address", "links", "machine", "wall_ns", "max_num_seqs", "lanes")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BOOKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_PROOF_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REDIS_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    NUM_REDIS_ERRORS_FIELD_NUMBER: _ClassVar[int]
    TOPOLOGY_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    worker: _kv_pb2.WorkerRef
    pool: str
    model: str
    fingerprint: str
    max_model_len: int
    transport: _kv_pb2.TransportPeer
    bundle_digest: str
    bundle: TokenizerBundle
    load: Load
    books: Books
    transport_kind: str
    step_cost: StepCost
    aliases: _containers.RepeatedScalarFieldContainer[str]
    transport_proof: bytes
    role: str
    redis_problem: str
    num_redis_errors: int
    topology: Topology
    metrics_address: str
    links: _containers.RepeatedCompositeFieldContainer[LinkReport]
    machine: str
    wall_ns: int
    max_num_seqs: int
    lanes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[_Union[_kv_pb2.WorkerRef, _Mapping]] = ..., pool: _Optional[str] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., transport: _Optional[_Union[_kv_pb2.TransportPeer, _Mapping]] = ..., bundle_digest: _Optional[str] = ..., bundle: _Optional[_Union[TokenizerBundle, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., books: _Optional[_Union[Books, _Mapping]] = ..., transport_kind: _Optional[str] = ..., step_cost: _Optional[_Union[StepCost, _Mapping]] = ..., aliases: _Optional[_Iterable[str]] = ..., transport_proof: _Optional[bytes] = ..., role: _Optional[str] = ..., redis_problem: _Optional[str] = ..., num_redis_errors: _Optional[int] = ..., topology: _Optional[_Union[Topology, _Mapping]] = ..., metrics_address: _Optional[str] = ..., links: _Optional[_Iterable[_Union[LinkReport, _Mapping]]] = ..., machine: _Optional[str] = ..., wall_ns: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., lanes: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_ms",)
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    timeout_ms: int
    def __init__(self, timeout_ms: _Optional[int] = ...) -> None: ...

class UndoDrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndoDrainReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("num_left", "num_moved", "num_given_back", "is_undone")
    NUM_LEFT_FIELD_NUMBER: _ClassVar[int]
    NUM_MOVED_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    IS_UNDONE_FIELD_NUMBER: _ClassVar[int]
    num_left: int
    num_moved: int
    num_given_back: int
    is_undone: bool
    def __init__(self, num_left: _Optional[int] = ..., num_moved: _Optional[int] = ..., num_given_back: _Optional[int] = ..., is_undone: _Optional[bool] = ...) -> None: ...

class ProbeLinkRequest(_message.Message):
    __slots__ = ("source", "num_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: _kv_pb2.WorkerRef
    num_bytes: int
    def __init__(self, source: _Optional[_Union[_kv_pb2.WorkerRef, _Mapping]] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ProbeLinkReply(_message.Message):
    __slots__ = ("refusal", "report")
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    refusal: Refusal
    report: LinkReport
    def __init__(self, refusal: _Optional[_Union[Refusal, _Mapping]] = ..., report: _Optional[_Union[LinkReport, _Mapping]] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("source", "link_type", "evidence", "num_bytes", "seconds", "problem", "refused")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LINK_TYPE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    source: _kv_pb2.WorkerRef
    link_type: str
    evidence: str
    num_bytes: int
    seconds: float
    problem: str
    refused: bool
    def __init__(self, source: _Optional[_Union[_kv_pb2.WorkerRef, _Mapping]] = ..., link_type: _Optional[str] = ..., evidence: _Optional[str] = ..., num_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., problem: _Optional[str] = ..., refused: _Optional[bool] = ...) -> None: ...
