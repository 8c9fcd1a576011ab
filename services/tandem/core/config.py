"""Define the tree of all settings as frozen dataclasses: the type, range, default and description of each setting.

The string under a field is its description, which `--help`, `tandem config` and the chart's schema show.
`tandem.core.settings` builds the tree from files, environment and flags. It refuses values outside the ranges, and
those that break a rule of `tandem.core.config_rules`. A program hands each room its section.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from sys import float_info
from typing import Annotated, Any, Literal

from msgspec import Meta

MAX_FLOAT = float_info.max
"""The bound of settings that may be any finite number: infinity is greater, and NaN is in no range."""

Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
OptionalPort = Annotated[int, Meta(ge=-1, le=65535)]
NonNegative = Annotated[float, Meta(ge=0, le=MAX_FLOAT)]
Positive = Annotated[float, Meta(gt=0, le=MAX_FLOAT)]
Pool = Literal["prefill", "decode", "mixed"]
Disaggregation = Literal["off", "auto", "prefer", "strict"]
RoutingPolicy = Literal["cost", "random", "round_robin", "least_loaded", "prefix"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


class Bytes(int):
    """A size in bytes; written `512MiB`, `2GiB` or a plain number of bytes."""

    @classmethod
    def parse(cls, text: str | int) -> Bytes:
        """Parse `512MiB`, `2GiB`, `4k` or a plain number of bytes; raise ValueError for any other text."""
        raw = str(text).strip().lower().removesuffix("b").rstrip()
        number = raw.rstrip("kmgti").rstrip()
        unit = raw[len(number) :].strip()
        unit = unit + "b" if unit.endswith("i") else unit
        if unit not in _UNITS or not number.isascii() or not number.replace(".", "", 1).isdigit():
            raise ValueError(f"not a size: {text!r} (write 512MiB, 2GiB or a number of bytes)")
        whole, _, fraction = number.partition(".")
        return cls(int(whole or 0) * _UNITS[unit] + int(float(f"0.{fraction or 0}") * _UNITS[unit]))

    def __str__(self) -> str:
        for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self and self % factor == 0:
                return f"{self // factor}{unit}"
        return int.__repr__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    id: str = "smollm2-135m-instruct"
    """alias, directory, .gguf file, hub id, or random: followed by the name of a published model"""
    served_name: str = ""
    """model name for clients, or several separated by commas; empty: the last part of model.id"""
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    """data type of weights, activations and KV; auto: float32 on a CPU, bfloat16 on a GPU"""
    quantization: Literal["none", "int8"] = "none"
    """quantization of weights; int8 computes in float32 with 8-bit products"""
    batch_invariant: bool = False
    """make a token's result bitwise independent of the rest of the batch and of the prefill chunking; slower on a GPU,
    free on a CPU, whose compiled kernels always compute so"""
    compact: bool = True
    """store weights in fewer bits where that is lossless (compiled kernels)"""
    device: Literal["cpu", "cuda"] = "cpu"
    """where the model runs"""
    generation_config: Literal["auto", "none"] = "auto"
    """none: ignore the model's own sampling defaults"""
    cache_dir: str = ""
    """directory of imported models; empty: $XDG_CACHE_HOME/tandem/models"""

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return the names that clients may use: those of `served_name`, else the last part of `id`."""
        if not self.served_name:
            return (PurePath(self.id).name.removesuffix(".gguf"),)
        return tuple(name.strip() for name in self.served_name.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    max_num_batched_tokens: PositiveCount = 512
    """token budget of one step"""
    max_num_seqs: PositiveCount = 64
    """sequences that may run at once"""
    max_model_len: Count = 0
    """most prompt and output tokens of one request; 0: what the model and the KV pool allow"""
    block_size: Count = 0
    """tokens per KV block; 0: 16 on a CPU, 64 on a GPU"""
    tensor_parallel: PositiveCount = 1
    """tensor-parallel ranks of one worker, each in a process and on a device of its own"""
    enable_chunked_prefill: bool = True
    """compute prompts in chunks; off: each prompt in one step, whatever the budget"""
    enable_prefix_caching: bool = True
    """reuse the KV of equal prefixes"""
    kv_cache_memory: Bytes = Bytes(0)
    """size of the KV pool of each rank; 0: 1GiB on a CPU, on a GPU what gpu_memory_utilization leaves"""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """fraction of a GPU's memory for all workers on it, KV pools included; `serve` divides it among them"""
    kv_cache_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """data type of KV; auto: model.dtype; float8: one byte a value, with a scale per token, head and plane"""
    host_cache_memory: Bytes = Bytes(0)
    """host memory for KV blocks evicted from the pool; 0: none. Worth it where GPU memory is scarce: on a CPU it is the
    same memory as the pool's, plus copies"""
    cuda_graphs: bool = True
    """on a GPU, capture decode-only steps once per batch size and replay them"""
    plan_depth: Annotated[int, Meta(ge=0, le=2)] = 0
    """steps planned ahead and not finished: with 2 the next is planned while a GPU computes; 0: by device"""
    num_threads: Count = 0
    """compute threads of one worker; 0: the cores divided by the workers"""
    kernels: Literal["auto", "compiled", "reference"] = "auto"
    """auto on a CPU: compiled where a C++ compiler, dtype and sizes allow, else plain torch; on a GPU: Triton"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    method: Literal["off", "ngram"] = "off"
    """ngram: draft the tokens that followed the same n-gram earlier in the sequence; the output stays the same"""
    num_tokens: PositiveCount = 8
    """most draft tokens of one sequence in a step"""
    max_batch_tokens: PositiveCount = 16
    """most running sequences and draft tokens in one step; with more sequences than this nothing is drafted"""
    ngram_min: PositiveCount = 2
    """shortest n-gram whose earlier occurrence gives a draft"""
    ngram_max: PositiveCount = 4
    """longest n-gram compared to choose among several earlier occurrences"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Latency targets in milliseconds for each lane; 0 means no target. `ttft_ms` and `itl_ms` are the interactive
    lane's."""

    ttft_ms: NonNegative = 0.0
    """time to first token, interactive lane; a prompt about to miss it goes ahead of shorter ones"""
    itl_ms: NonNegative = 0.0
    """time between two tokens, interactive lane; prefill chunks shrink to fit it"""
    standard_ttft_ms: NonNegative = 0.0
    """time to first token, standard lane"""
    standard_itl_ms: NonNegative = 0.0
    """time between two tokens, standard lane"""
    batch_ttft_ms: NonNegative = 0.0
    """time to first token, batch lane"""
    batch_itl_ms: NonNegative = 0.0
    """time between two tokens, batch lane"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    transport: Literal["nixl", "local"] = "nixl"
    """how KV blocks move between workers"""
    lease_s: Positive = 10.0
    """how long a producer keeps offered KV without a renewal"""
    pull_timeout_s: Positive = 30.0
    """a pull fails when neither KV nor a message of its source arrives for this long"""
    drain_timeout_s: Positive = 10.0
    """a read that does not end for this long costs the connection to that worker"""
    digests: bool = True
    """check every block that was read; off is for measuring only"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """Requirements on the link between two workers. The bandwidth of some pairs is measured when the workers connect,
    that of others from their first transfers."""

    require: Literal["any", "rdma", "cuda_ipc", "shared_memory"] = "any"
    """transport that KV must use: rdma is required between machines, cuda_ipc and shared_memory within one"""
    min_gbps: NonNegative = 0.0
    """gigabytes per second that a link must reach in a bandwidth probe; 0: any"""
    on_slow_link: Literal["refuse", "warn"] = "refuse"
    """refuse: hand-offs avoid a pair of workers whose link is known to miss the requirements: a few pairs of each
    worker are probed before use, others are judged once reads of 1 MiB and more add up to 16 MiB; remote prefix fetches
    are exempt. warn: hand-offs use the pair, and logs and metrics report it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    pool: Pool = "mixed"
    """role of the worker, which routers read"""
    id: str = ""
    """stable name of the worker; empty: host and process id"""
    host: str = "127.0.0.1"
    """address to bind and advertise; for 0.0.0.0 and :: it advertises $POD_IP, else an address of its machine"""
    host_label: str = ""
    """label of the worker's machine; KV moves fastest between workers of one machine"""
    rack: str = ""
    """label of the worker's rack"""
    zone: str = ""
    """label of the worker's zone"""
    port: Port = 0
    """gRPC port; 0: any free one"""
    advertise_address: str = ""
    """host:port at which others reach the worker, behind a proxy or NAT; port 0: the port it listens at; empty: the
    address it listens at"""
    drain_s: NonNegative = 20.0
    """how long running work may take to migrate or end after SIGTERM"""
    gateway_grace_s: NonNegative = 10.0
    """how long jobs live on after their gateway's stream is gone"""
    step_stall_s: Positive = 30.0
    """a step longer than this (and than 20 times its prediction) makes the worker unhealthy"""
    queue_horizon_ms: NonNegative = 0.0
    """predicted prefill accepted beside the longest prompt of each size; the rest waits in gateways; 0: two steps"""
    step_log: str = ""
    """directory for one append-only log of steps per process; empty: none"""
    run_dir: str = ""
    """directory of the file by which `tandem drain --local` finds the worker; empty: none"""
    metrics_port: OptionalPort = 0
    """port of the worker's own /metrics; 0: any free one, which gateways list; -1: none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    host: str = "127.0.0.1"
    """address to bind"""
    port: Port = 8000
    """HTTP port; 0: any free one"""
    grpc_port: OptionalPort = -1
    """gRPC port; 0: any free one; -1: the one after port, any free one where that is 0"""
    auth: Literal["keys", "off"] = "keys"
    """keys: requests without an API key are refused; off: everybody is served"""
    tenants: str = ""
    """YAML file of tenants and the hashes of their API keys; reloaded when it changes"""
    disaggregation: Disaggregation = "prefer"
    """off: never split; auto: split where it costs less; prefer: split while both pools have workers; strict: split or
    refuse"""
    routing_policy: RoutingPolicy = "cost"
    """how workers are chosen; all but cost are baselines for comparison"""
    remote_prefix: bool = True
    """fetch a prompt's prefix from another worker's cache where that costs less than computing it"""
    max_body: Bytes = Bytes(4 << 20)
    """largest request body or gRPC message"""
    request_timeout_s: Positive = 60.0
    """a request that has not arrived completely after this long is refused"""
    stalled_client_s: Positive = 60.0
    """a client that reads nothing of its response for this long is disconnected"""
    max_connections: PositiveCount = 4096
    """HTTP connections, and gRPC calls, at once; beyond that only probes are answered"""
    queue_timeout_s: Positive = 120.0
    """a request that finds no worker with capacity for this long is refused"""
    no_worker_wait_s: NonNegative = 30.0
    """the same limit while no suitable worker is alive, as after a crash"""
    max_retries: Count = 4
    """failed attempts in a row without a new token that a request survives"""
    # Four times the timeout between workers, so that they report a failure first and a long prompt has enough time.
    progress_timeout_s: Positive = 120.0
    """an attempt fails when its workers make no progress for this long"""
    drain_s: NonNegative = 20.0
    """how long requests in flight may take after SIGTERM"""
    worker_timeout_s: Annotated[float, Meta(ge=3, le=MAX_FLOAT)] = 10.0
    """a worker whose stream carries nothing for this long is lost"""
    heartbeat_s: Positive = 10.0
    """how often a stream without a first token yet sends a comment"""
    max_queued: PositiveCount = 1024
    """requests that may wait for a worker; beyond that the tenant with most of them loses one"""
    early_rejection: Literal["on", "off"] = "on"
    """refuse at once a request predicted to miss its lane's slo or its client's deadline"""
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = "auto"
    """how the model writes tool calls; auto: detected from its chat template or vocabulary"""
    console: bool = True
    """serve the console at /console; with auth=keys it requires an API key"""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """whether text in <think> is reasoning; auto: if the model's template or vocabulary has that tag"""

    @property
    def own_grpc_port(self) -> int:
        """Return the gRPC port with -1 resolved to the port after `port`; 0 means any free port."""
        if self.grpc_port >= 0:
            return self.grpc_port
        return self.port + 1 if self.port else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Logs and metrics of every program. OpenTelemetry's own `OTEL_*` variables choose where traces and metrics are
    sent; without them nothing is sent."""

    log_format: Literal["text", "json"] = "text"
    """lines for people, or one JSON object per line"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level that is logged"""
    log_requests: Literal["off", "failed", "all"] = "failed"
    """which ended requests the gateway logs, one line each"""
    max_values: PositiveCount = 100
    """tenants, models and workers with metric labels of their own; the rest is 'other'"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    url: str = ""
    """redis://, rediss:// or unix://; redis+cluster:// or rediss+cluster:// with nodes separated by commas; empty: an
    embedded server where `serve` starts one"""
    namespace: str = "tandem"
    """prefix of every Redis key"""
    index_stride: Annotated[int, Meta(ge=1, le=64)] = 1
    """publish every n-th block of a prompt to the prefix index; the same in gateways and workers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How gateways and workers authenticate each other; all of them need the same settings."""

    secret_file: str = ""
    """file with one secret of 32 bytes or more per line: the first signs, a second is accepted"""
    insecure: bool = False
    """let a worker without a secret or TLS listen on a non-loopback address"""
    tls_cert_file: str = ""
    """PEM certificate for the name tandem-cluster; with all three files, gateways and workers use TLS"""
    tls_key_file: str = ""
    """PEM private key of tls_cert_file"""
    tls_ca_file: str = ""
    """PEM certificates of the trusted CA"""

    @property
    def has_tls(self) -> bool:
        """Return whether any TLS file is set."""
        return bool(self.tls_cert_file or self.tls_key_file or self.tls_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    prefill: Count = 1
    """prefill workers"""
    decode: Count = 1
    """decode workers"""
    mixed: Count = 0
    """mixed workers"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """Settings of the planner: how many workers of each role to keep so that the targets of `slo` are met, and where to
    start them."""

    mode: Literal["explain", "act"] = "explain"
    """explain: decide and say why, change nothing"""
    actuator: Literal["serve", "raycluster"] = "serve"
    """serve: set the targets of Serve's autoscaling policy, and Ray's autoscaler adds pods; raycluster: also set the
    pods of a RayCluster whose own autoscaler is off"""
    model: str = ""
    """model whose workers are planned; empty: the one that the workers serve"""
    interval_s: Positive = 5.0
    """time between two decisions"""
    window_s: Positive = 300.0
    """length of the demand history that a forecast uses"""
    start_s: Positive = 60.0
    """how long a new worker takes until it serves; the forecast's horizon"""
    percentile: Annotated[float, Meta(ge=50, lt=100)] = 99.0
    """percentage of requests that are to meet the targets"""
    headroom: Annotated[float, Meta(ge=0, lt=1)] = 0.15
    """fraction of the capacity kept free beyond the forecast demand"""
    scale_down_s: NonNegative = 300.0
    """how long fewer workers must have been enough before some are removed"""
    change_roles: bool = True
    """change the role of a worker instead of starting one, where that is enough"""
    min_prefill: Count = 1
    """fewest prefill workers"""
    max_prefill: Count = 0
    """most prefill workers; 0: any number"""
    min_decode: Count = 1
    """fewest decode workers"""
    max_decode: Count = 0
    """most decode workers; 0: any number"""
    host: str = "127.0.0.1"
    """address to bind for /metrics and /health"""
    metrics_port: OptionalPort = 0
    """port of /metrics and /health; 0: any free one; -1: none"""
    kubernetes_namespace: str = ""
    """namespace of the planned objects; empty: the planner pod's own, else default"""
    rayservice: str = ""
    """name of the RayService whose active RayCluster is planned"""
    raycluster: str = ""
    """name of a RayCluster without a RayService, instead of rayservice"""
    groups: str = ""
    """worker groups by role, as prefill=GROUP,decode=GROUP; GROUP:2+1: two workers in a pod, and one spare pod"""
    lease: str = "tandem-planner"
    """name of the Lease for leader election among planners"""
    lease_s: Annotated[float, Meta(ge=3, le=MAX_FLOAT)] = 15.0
    """a leader that has not renewed its Lease for this long has lost it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    slo: SloConfig = SloConfig()
    handoff: HandoffConfig = HandoffConfig()
    transfer: TransferConfig = TransferConfig()
    worker: WorkerConfig = WorkerConfig()
    gateway: GatewayConfig = GatewayConfig()
    redis: RedisConfig = RedisConfig()
    cluster: ClusterConfig = ClusterConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    serve: ServeConfig = ServeConfig()
    planner: PlannerConfig = PlannerConfig()


def value_of(config: Config, key: str) -> Any:
    """Return the value of the setting `key`, written `section.name`; raise AttributeError or ValueError for no such
    setting."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
