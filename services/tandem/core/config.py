"""Define the tree of all settings as frozen dataclasses: the type, range, default and description of each setting.

The string under a field is its description, which `--help`, `tandem config` and the chart's schema show.
`tandem.core.settings` builds the tree from files, environment and flags. It refuses values outside the ranges, and
those that break a rule of `tandem.core.config_rules`. A program passes each package its section of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from sys import float_info
from typing import Annotated, Any, Literal

from msgspec import Meta

from tandem.core.lane import Lane, parse_lanes

MAX_FLOAT = float_info.max
"""The bound of settings that may be any finite number: infinity is greater, and NaN is in no range."""

Count = Annotated[int, Meta(ge=0)]
PositiveCount = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
KnownPort = Annotated[int, Meta(ge=1, le=65535)]
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
            raise ValueError(f"{text!r} is not a size: write 512MiB, 2GiB or a number of bytes")
        whole, _, fraction = number.partition(".")
        return cls(int(whole or 0) * _UNITS[unit] + int(float(f"0.{fraction or 0}") * _UNITS[unit]))

    def __str__(self) -> str:
        for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if self and self % factor == 0:
                return f"{self // factor}{unit}"
        return int.__repr__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its precision and the device that runs it."""

    id: str = "smollm2-135m-instruct"
    """Name the model to load: an alias (smollm2-135m-instruct), a directory in Hugging Face format, a .gguf file, a
    Hugging Face hub id (org/name), or random:NAME for a published architecture with random weights. A hub id is
    downloaded at the first start."""
    served_name: str = ""
    """Set the model name that clients send, or several names separated by commas. Empty means the last part of
    model.id."""
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = "auto"
    """Choose the data type of weights, activations and KV cache. auto means float32 on a CPU and bfloat16 on a GPU."""
    quantization: Literal["none", "int8", "fp8"] = "none"
    """Quantize the weights when they are loaded. int8, on a CPU only, stores them in at most 8 bits and rounds
    activations to 8 bits. fp8, on a GPU only, stores weights that are floats in float8, and rounds activations that
    meet float8 weights. Both change the output slightly. none rounds neither."""
    batch_invariant: bool = False
    """Make the logits of a token independent, bit for bit, of the other requests in its batch and of the chunks of its
    prompt. It is slower on a GPU; the compiled CPU kernels always compute this way."""
    compact: bool = True
    """Store weights in fewer bits where that loses no information, which saves memory bandwidth on a CPU. Turn it off
    only to measure its effect."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Choose the device that runs the model."""
    generation_config: Literal["auto", "none"] = "auto"
    """Choose the defaults of sampling parameters that a request does not set. auto takes them from the model's
    generation_config.json, none ignores that file."""
    cache_dir: str = ""
    """Set the directory for downloaded wheels, converted GGUF files and packed weights. Empty means
    $XDG_CACHE_HOME/tandem/models, which is ~/.cache/tandem/models on most machines."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """Return the names that clients may use for the model: the names listed in `served_name`, or the last part of
        `id` if it is empty."""
        if not self.served_name:
            return (PurePath(self.id).name.removesuffix(".gguf"),)
        return tuple(name.strip() for name in self.served_name.split(","))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Batching, KV cache memory and kernels of each worker."""

    max_num_batched_tokens: PositiveCount = 512
    """Limit the tokens that one step computes, decodes and prompt chunks together. Raise it for throughput and shorter
    TTFT; lower it, or set slo.itl_ms, for shorter ITL."""
    max_num_seqs: PositiveCount = 64
    """Limit the sequences that one worker runs at the same time. It must not exceed engine.max_num_batched_tokens."""
    max_model_len: Count = 0
    """Limit the tokens of one request, prompt and output together. 0 means the smaller of the model's context length
    and the size of the KV pool."""
    block_size: Count = 0
    """Set the number of tokens per KV block, a power of two from 8 to 256, equal for all workers of a model. 0 means 16
    on a CPU and 64 on a GPU."""
    tensor_parallel: PositiveCount = 1
    """Split the model of one worker over this number of ranks. Each rank is a process, with a GPU of its own where
    model.device is cuda."""
    enable_expert_parallel: bool = False
    """Place each expert of a mixture on one of the engine.tensor_parallel ranks, instead of a part of it on all. It
    suits many small experts, whose parts would be too narrow to be multiplied well."""
    nnodes: PositiveCount = 1
    """Divide the ranks of one worker evenly among this number of machines. Start `tandem worker` on each of them with
    its own engine.node_rank; under Ray the ranks may then be on several machines."""
    node_rank: Count = 0
    """Set the number of this machine among the engine.nnodes machines of its worker, from 0. The program on machine 0
    is the worker; those on the others run further ranks of it."""
    master_addr: str = ""
    """Set the host name or address of machine 0, to which the other machines of the worker connect."""
    master_port: KnownPort = 29501
    """Set the TCP port on which machine 0 accepts the ranks of the worker's other machines, while it starts."""
    enable_chunked_prefill: bool = True
    """Split long prompts over several steps, so that running requests keep producing tokens meanwhile. When off, each
    prompt is computed in one step, even beyond engine.max_num_batched_tokens."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of finished requests while there is room, and reuse them for prompts that begin with the same
    tokens."""
    kv_cache_memory: Bytes = Bytes(0)
    """Set the memory for KV blocks of each rank in bytes, for example 8GiB. 0 means 1GiB on a CPU, and on a GPU what
    engine.gpu_memory_utilization leaves after the weights."""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Set the fraction of a GPU's memory, from 0 to 1, for weights, activations and KV cache of the workers on it.
    `tandem serve` divides it among its workers; workers that you start yourself each need their own share."""
    kv_cache_dtype: Literal["auto", "float8_e4m3fn"] = "auto"
    """Choose the data type of the KV cache. auto means model.dtype; float8_e4m3fn stores one byte per value with
    scales, which halves the cache of a 16-bit model and needs a GPU of compute capability 8.9 or the CPU's reference
    kernels."""
    max_retained_fraction: Annotated[float, Meta(ge=0, le=0.9)] = 0.25
    """Set the fraction of the KV pool that requests may protect from eviction by cache_control. 0 ignores it."""
    host_cache_memory: Bytes = Bytes(0)
    """Set the host memory, in bytes per rank, for KV blocks that are evicted from the pool and loaded again when a
    prompt begins with them. 0 turns it off, or means 1GiB with engine.file_cache_path. It helps where GPU memory is
    scarce; on a CPU, raise engine.kv_cache_memory instead."""
    file_cache_path: str = ""
    """Keep KV blocks that are evicted from the pool in files below this directory, on a local disk or a file system
    that several workers mount, and read them when a prompt begins with them, also after a restart. Who can read the
    directory can read the KV of all tenants. Empty keeps none; it needs engine.tensor_parallel=1."""
    file_cache_size: Bytes = Bytes(32 << 30)
    """Limit the bytes of the files of one model below engine.file_cache_path. Beyond it the files that were used least
    recently are deleted."""
    cuda_graphs: bool = True
    """Capture decode-only steps as CUDA graphs at startup, one per batch size, which shortens steps on a GPU. Turn it
    off to start faster or to save GPU memory."""
    plan_depth: Annotated[int, Meta(ge=0, le=2)] = 0
    """Set the number of steps that may be planned before the first of them has finished; 2 plans the next step while
    the GPU computes. 0 means 2 on a GPU without speculative decoding, else 1."""
    num_threads: Count = 0
    """Set the compute threads of one worker on a CPU. 0 means all cores of the machine; `tandem serve` divides the
    cores among its workers."""
    kernels: Literal["auto", "compiled", "reference"] = "auto"
    """Choose the implementation of the model's kernels on a CPU. auto uses the compiled C++ kernels where a compiler,
    the data type and the model's sizes allow, else reference, which is plain torch; a GPU always uses its Triton
    kernels and needs auto."""

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each machine of the worker."""
        return self.tensor_parallel // self.nnodes

    @property
    def node_ranks(self) -> range:
        """Return the numbers of the ranks on this machine."""
        return range(self.node_rank * self.ranks_per_node, (self.node_rank + 1) * self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding, which proposes several tokens and verifies them in one step."""

    method: Literal["off", "ngram"] = "off"
    """Choose how draft tokens are proposed. ngram copies the tokens that followed the same n-gram earlier in the
    sequence, which speeds up edits and summaries and does not change the output; off disables speculation."""
    num_tokens: PositiveCount = 8
    """Limit the draft tokens of one sequence in one step."""
    max_batch_tokens: PositiveCount = 16
    """Limit the running sequences and draft tokens of one step together. With more running sequences than this nothing
    is drafted, because drafts would only lengthen the step."""
    ngram_min: PositiveCount = 2
    """Set the length in tokens of the shortest n-gram whose earlier occurrence gives a draft."""
    ngram_max: PositiveCount = 4
    """Set the length in tokens up to which matches are compared when an n-gram occurred several times before. The
    longest match is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanesConfig:
    """Limits and preemption of requests by lane (priority class), on each worker."""

    batch_max_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Let batch requests start on a worker only while they take at most this fraction of its sequences
    (engine.max_num_seqs) and of its KV blocks; one may always run. Lower it to shorten the ITL of other lanes."""
    max_preemptions: Annotated[int, Meta(ge=0, le=1000)] = 2
    """Set how often a running request may give its seat (one of engine.max_num_seqs) and KV blocks to a waiting request
    of a more urgent lane. It loses no token and is computed again later, for the most part from the prefix cache. 0
    means never."""
    max_pause_s: Positive = 30.0
    """Set the seconds after which a preempted request that still waits is the next to go on, whatever its lane. Others
    yield to it then as to an interactive one, and it yields no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Latency targets in milliseconds for each lane. 0 means no target; `ttft_ms` and `itl_ms` are those of the
    interactive lane."""

    ttft_ms: NonNegative = 0.0
    """Set the target for the time to first token of interactive requests, in milliseconds. Prompts about to miss it are
    computed first, hopeless requests are rejected (gateway.early_rejection) and the planner sizes prefill for it."""
    itl_ms: NonNegative = 0.0
    """Set the target for the time between two output tokens of interactive requests, in milliseconds. Workers shorten
    prompt chunks to keep it, and the planner sizes decode for it."""
    standard_ttft_ms: NonNegative = 0.0
    """Set the target for the time to first token of standard requests, in milliseconds."""
    standard_itl_ms: NonNegative = 0.0
    """Set the target for the time between two output tokens of standard requests, in milliseconds."""
    batch_ttft_ms: NonNegative = 0.0
    """Set the target for the time to first token of batch requests, in milliseconds."""
    batch_itl_ms: NonNegative = 0.0
    """Set the target for the time between two output tokens of batch requests, in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffConfig:
    """The transfer of KV blocks between workers."""

    lease_s: Positive = 10.0
    """Set the seconds for which a prefill worker keeps blocks for a decode worker that does not renew its lease. Keep
    it below handoff.pull_timeout_s."""
    pull_timeout_s: Positive = 30.0
    """Set the seconds without any KV block or message from the prefill worker after which a transfer fails. The prompt
    is then computed again elsewhere."""
    drain_timeout_s: Positive = 10.0
    """Set the seconds after which a cancelled read that has not ended closes the connection to that worker."""
    digests: bool = True
    """Check a 64-bit digest of every KV block that was read from another worker. Turn it off only to measure its cost,
    because corrupt KV would go unnoticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig:
    """The transport of KV blocks between workers, and requirements on the link between two of them.

    The bandwidth of some pairs is measured when the workers connect; that of all other pairs is computed from their
    first transfers.
    """

    backend: Literal["auto", "nixl", "tcp", "local"] = "auto"
    """Choose how KV blocks move between workers, equal for all of them. nixl uses NIXL over UCX (RDMA, CUDA IPC, shared
    memory or TCP); tcp uses connections of Tandem's own; auto uses nixl for pairs of workers with RDMA or on one
    machine, and tcp for all other pairs; local reads the memory of another process on the same machine and works on
    CPUs only."""
    nixl_backends: str = "UCX"
    """Set the backends of NIXL, separated by commas, in order of preference: UCX, or LIBFABRIC for AWS' EFA, over which
    UCX is very slow. A worker uses the first that works on its machine; two workers with different ones move KV over
    TCP, or not at all where transfer.backend is nixl."""
    network_devices: str = ""
    """Set the network devices at which a worker offers its KV over TCP, and those that UCX may use, separated by
    commas: interfaces such as eth1, and RDMA devices such as mlx5_0. Each read is spread over all of them. Empty means
    worker.host for TCP, and all devices for UCX."""
    require: Literal["any", "rdma", "cuda_ipc", "shared_memory"] = "any"
    """Require this type of link for KV: rdma applies between machines, cuda_ipc and shared_memory within one machine.
    any accepts every link."""
    min_gbps: NonNegative = 0.0
    """Set the bandwidth that every link must reach, in gigabytes per second. 0 accepts every bandwidth."""
    on_slow_link: Literal["refuse", "warn"] = "refuse"
    """Choose what happens to a link that misses transfer.require or transfer.min_gbps. refuse places no handoff on it,
    once it was probed or has moved 16 MiB; warn uses it and reports it in logs and metrics."""

    @property
    def nixl_backend_names(self) -> tuple[str, ...]:
        """Return the names in `nixl_backends`, in upper case."""
        return tuple(name.strip().upper() for name in self.nixl_backends.split(","))

    @property
    def network_device_names(self) -> tuple[str, ...]:
        """Return the names in `network_devices`; empty if it names none."""
        return tuple(name.strip() for name in self.network_devices.split(",") if name.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The role, lanes, addresses and end of each worker."""

    pool: Pool = "mixed"
    """Set the role in which gateways use this worker: prefill, decode, or mixed for both. `tandem role` changes it at
    runtime."""
    lanes: str = ""
    """Set the lanes whose requests gateways place on this worker, separated by commas: interactive, standard, batch.
    Empty means all lanes."""
    id: str = ""
    """Set the name of the worker in logs, metrics and `tandem role`, unique in the cluster. Empty means host name and
    process id."""
    host: str = "127.0.0.1"
    """Set the address to listen on, which is also advertised to the cluster. With 0.0.0.0 or :: the worker advertises
    $POD_IP, or the address of its default route."""
    host_label: str = ""
    """Set a label that is equal for all workers of one machine. Gateways prefer pairs of workers with equal labels;
    empty equals no other label."""
    rack: str = ""
    """Set a label that is equal for all workers of one rack. Gateways prefer pairs of workers with equal labels; empty
    equals no other label."""
    zone: str = ""
    """Set a label that is equal for all workers of one zone. Gateways prefer pairs of workers with equal labels; empty
    equals no other label."""
    port: Port = 0
    """Set the TCP port of the worker's gRPC server. 0 means any free port."""
    advertise_address: str = ""
    """Set the host:port at which gateways and other workers reach this worker behind a proxy or NAT; port 0 stands for
    the port it listens on. Empty means the address it listens on."""
    drain_s: NonNegative = 20.0
    """Set the seconds that running requests have to finish or migrate after SIGTERM. Keep it below the grace period of
    your supervisor."""
    gateway_grace_s: NonNegative = 10.0
    """Set the seconds for which a worker continues the jobs of a gateway whose connection is lost. Then it cancels them
    and frees their blocks."""
    step_stall_s: Positive = 30.0
    """Set the seconds after which a step that does not end makes the worker unhealthy, so that it is restarted. Steps
    of 20 times the longest recent one are tolerated, whatever this limit is."""
    queue_horizon_ms: NonNegative = 0.0
    """Set how many milliseconds of prompts, by predicted compute time, a worker accepts in addition to its longest one;
    further prompts wait in the gateway. 0 means two steps of engine.max_num_batched_tokens."""
    step_log: str = ""
    """Write the batch and duration of every step to a file in this directory, as input of `tandem fit-cost`. Empty
    writes none."""
    run_dir: str = ""
    """Set the directory in which a worker keeps a file while it runs, on each machine with ranks of it, by which
    `tandem drain --local` finds it. Empty writes none."""
    metrics_port: OptionalPort = 0
    """Set the TCP port of the worker's /metrics. 0 means any free port, which the gateways list for Prometheus; -1
    turns it off."""

    @property
    def served_lanes(self) -> frozenset[Lane]:
        """Return the lanes listed in `lanes`; all lanes if it is empty. Raises ValueError for an unknown one."""
        return parse_lanes(self.lanes)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The gateway: addresses, authentication, routing, queue and timeouts."""

    host: str = "127.0.0.1"
    """Set the address to listen on. Use 0.0.0.0 to accept clients from other machines, which requires gateway.auth to
    be set."""
    port: Port = 8000
    """Set the TCP port of the HTTP API. 0 means any free port."""
    grpc_port: OptionalPort = -1
    """Set the TCP port of the gRPC API. -1 means the port after gateway.port, or any free port where that is 0; 0 means
    any free port."""
    metrics_port: OptionalPort = -1
    """Set a TCP port for /metrics and the paths below it, which then need no key and are not at gateway.port: let only
    Prometheus reach it. 0 means any free port. -1 means gateway.port, where they need an operator's key with
    gateway.auth=keys."""
    metrics_host: str = ""
    """Set the address to listen on at gateway.metrics_port. Empty means gateway.host."""
    auth: Literal["keys", "off"] = "keys"
    """Choose who may send requests. keys requires an API key of gateway.tenants, off serves everybody; `tandem serve`
    defaults to off and then listens on loopback addresses only."""
    tenants: str = ""
    """Set the YAML file with tenants, their quotas and the hashes of their API keys (`tandem key` makes one). It is
    read again when it changes."""
    tls_cert_file: str = ""
    """Set the PEM file with the certificate, and those of intermediate CAs, that HTTP and gRPC clients see. It is read
    again when it changes. Empty means plain HTTP and gRPC."""
    tls_key_file: str = ""
    """Set the PEM file with the private key of gateway.tls_cert_file, without a password."""
    tls_client_ca_file: str = ""
    """Set the PEM file with the CA certificates that clients' certificates are checked against (mutual TLS). Then
    clients without a certificate get only /health, /live and /ready. Empty means that clients need none."""
    allowed_hosts: str = ""
    """Set the host names, separated by commas and without ports, that clients may address over HTTP: *.example.com
    stands for all names below example.com, * for every name. Requests for other names fail with 421
    misdirected_request. Loopback names, gateway.host and the address that a client connected to are always allowed.
    Empty allows no other names where gateway.host is a loopback address, and every name elsewhere."""
    disaggregation: Disaggregation = "prefer"
    """Choose when prefill and decode of a request run on different workers. off: never; auto: where it is predicted to
    be cheaper; prefer: while both roles have workers; strict: always, and requests fail where a role has no workers."""
    routing_policy: RoutingPolicy = "cost"
    """Choose how workers are selected for a request. cost predicts latency from load, prefix hits and link bandwidth;
    the others are baselines for comparison."""
    remote_prefix: bool = True
    """Read the KV of a prompt's prefix from another worker's cache where that is predicted to be faster than computing
    it."""
    max_body: Bytes = Bytes(4 << 20)
    """Limit the size in bytes of an HTTP request body or a gRPC message, for example 16MiB. Larger requests fail with
    413."""
    request_timeout_s: Positive = 60.0
    """Set the seconds that a client has to send a complete HTTP request. Slower requests fail with 408."""
    min_body_bytes_per_s: NonNegative = 240.0
    """Set the bytes per second with which the body of an HTTP request must arrive on average, from
    gateway.body_grace_s after its beginning on. Slower requests fail with 408. 0 turns this limit off."""
    body_grace_s: Positive = 5.0
    """Set the seconds for which the body of an HTTP request may arrive more slowly than
    gateway.min_body_bytes_per_s."""
    stalled_client_s: Positive = 60.0
    """Set the seconds for which a client may read nothing of its response before it is disconnected."""
    max_connections: PositiveCount = 4096
    """Limit the open HTTP connections, and separately the gRPC calls. Beyond it only the probes /health, /live and
    /ready are answered; other requests fail with 503 overloaded."""
    queue_timeout_s: Positive = 120.0
    """Set the seconds that a request waits in the queue while no worker has capacity. Then it fails with 503
    no_worker."""
    no_worker_wait_s: NonNegative = 30.0
    """Set the seconds that a request waits while no suitable worker is alive, as during a restart. Then it fails with
    503 no_worker."""
    wake_timeout_s: NonNegative = 0.0
    """Set the seconds that a request waits while no worker could serve it. Then it fails with 503 no_worker. Set it
    above the time in which a worker starts where planner.min_prefill or planner.min_decode is 0. Above 0 it replaces
    gateway.no_worker_wait_s as this limit, also where no planner acts. While a planner acts, a model without workers
    accepts new requests. With 0, or without such a planner, new requests fail with 404 once no worker has served the
    model for gateway.no_worker_wait_s."""
    max_retries: Count = 4
    """Limit how many times in a row a request is tried again on other workers without a new token. Then it fails with
    the last error."""
    # Four times the timeout between workers, so that they report a failure first and a long prompt has enough time.
    progress_timeout_s: Positive = 120.0
    """Set the seconds without progress of its workers after which a request is tried again on others. Keep it several
    times handoff.pull_timeout_s, so that long prompts have enough time."""
    drain_s: NonNegative = 20.0
    """Set the seconds that open requests have to finish after SIGTERM. Keep it below the grace period of your
    supervisor."""
    worker_timeout_s: Annotated[float, Meta(ge=3, le=MAX_FLOAT)] = 10.0
    """Set the seconds without any message on a worker's connection after which the worker counts as lost and its
    requests are tried again. Workers send at least one message per second."""
    heartbeat_s: Positive = 10.0
    """Set the seconds between the comments that a stream sends before its first token, so that proxies keep the
    connection open."""
    max_queued: PositiveCount = 1024
    """Limit the requests that wait for a worker. Beyond it the tenant with the most waiting requests loses one, which
    fails with 503 overloaded."""
    kv_time_tokens: NonNegative = 0.0
    """Count each second for which a request holds 1,000 tokens of KV at workers as this many tokens. A tenant is then
    charged for a request with the larger of its tokens and its KV time. A good value is 1,000 times the tokens per
    second that the cluster computes, divided by the KV tokens that it can hold. 0 charges tokens alone."""
    early_rejection: Literal["on", "off"] = "on"
    """Reject a request at once, with 503 predicted_slo_miss, if it is predicted to miss the slo.ttft_ms of its lane or
    its client's deadline."""
    rebalance: Literal["off", "explain", "on"] = "off"
    """Choose whether running requests move, with their KV, from a decode worker with a long predicted ITL to one with a
    shorter, and to a decode worker with room where they were preempted or their worker's role has become prefill.
    explain only logs and counts what would move; off compares nothing."""
    rebalance_min_gain: Annotated[float, Meta(ge=0.01, lt=1)] = 0.2
    """Set the fraction by which the predicted ITL of a request must become shorter for it to move to another decode
    worker."""
    rebalance_max_moves: PositiveCount = 2
    """Set how often a request may move to another decode worker, for whatever reason of gateway.rebalance. Its retries
    and other migrations count too."""
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = "auto"
    """Choose the format in which the model writes tool calls. auto detects it from the chat template and vocabulary;
    none returns tool calls as text."""
    console: bool = True
    """Serve the web console at /console. With gateway.auth=keys it requires an API key."""
    reasoning_parser: Literal["auto", "think", "none"] = "auto"
    """Choose whether text in <think> is returned as reasoning_content. auto does so if the model's chat template or
    vocabulary has that tag."""

    @property
    def host_patterns(self) -> tuple[str, ...]:
        """Return the host patterns listed in `allowed_hosts`, in lower case, with IPv6 addresses without brackets."""
        patterns = self.allowed_hosts.lower().split(",") if self.allowed_hosts else []
        return tuple(pattern.strip().strip("[]") for pattern in patterns)

    @property
    def has_tls(self) -> bool:
        """Return whether any TLS file of the gateway is set."""
        return bool(self.tls_cert_file or self.tls_key_file or self.tls_client_ca_file)

    @property
    def scheme(self) -> str:
        """Return the scheme of the gateway's HTTP address: https with TLS, else http."""
        return "https" if self.has_tls else "http"

    @property
    def own_metrics_host(self) -> str:
        """Return the address to listen on at gateway.metrics_port: `metrics_host`, or `host` where `metrics_host` is
        empty."""
        return self.metrics_host or self.host

    @property
    def own_grpc_port(self) -> int:
        """Return the port of the gRPC API. A `grpc_port` of -1 is replaced by the port after `port`; the result 0 means
        any free port."""
        if self.grpc_port >= 0:
            return self.grpc_port
        return self.port + 1 if self.port else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Logs and metrics of every program. OpenTelemetry's own `OTEL_*` variables choose where traces and metrics are
    sent; without them nothing is sent."""

    log_format: Literal["text", "json"] = "text"
    """Choose the format of log lines: text for people, json for one JSON object per line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Set the lowest level of log lines that are written."""
    log_requests: Literal["off", "failed", "all"] = "failed"
    """Choose which ended requests the gateway logs, one line each: off, failed or all."""
    max_values: PositiveCount = 100
    """Limit the tenants, models and workers that have metric series of their own. Further ones are counted together
    under the label value other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisConfig:
    """The Redis server that gateways, workers and planners of one cluster share."""

    url: str = ""
    """Set the Redis server: redis://, rediss:// or unix:// for one server, redis+cluster:// or rediss+cluster:// with
    nodes separated by commas for a Redis Cluster. Empty makes `tandem serve` start its own; all other programs need a
    URL."""
    namespace: str = "tandem"
    """Set the prefix of every Redis key. Clusters that share a Redis server need different ones."""
    index_stride: Annotated[int, Meta(ge=1, le=64)] = 1
    """Publish only every n-th block of a prompt to the prefix index, equal for gateways and workers. Raise it to lower
    the load of Redis; matches of prefixes are then less precise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How gateways and workers authenticate each other; all of them need the same settings."""

    secret_file: str = ""
    """Set the file with the secrets by which gateways and workers sign their calls: 32 bytes or more per line, the
    first line signs, a second line is accepted too. Empty means calls are not signed; `tandem serve` then makes a
    secret for its run."""
    insecure: bool = False
    """Allow a worker without secret or TLS to listen on an address that other machines reach. Anybody who reaches it
    may then submit jobs and read KV."""
    tls_cert_file: str = ""
    """Set the PEM file with this program's certificate, valid for the name tandem-cluster. Gateways and workers use
    mutual TLS when all three tls files are set."""
    tls_key_file: str = ""
    """Set the PEM file with the private key of cluster.tls_cert_file."""
    tls_ca_file: str = ""
    """Set the PEM file with the CA certificates that the other side's certificate is checked against."""

    @property
    def has_tls(self) -> bool:
        """Return whether any TLS file of this section is set."""
        return bool(self.tls_cert_file or self.tls_key_file or self.tls_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The number of workers that `tandem serve` starts."""

    prefill: Count = 1
    """Set the number of prefill workers."""
    decode: Count = 1
    """Set the number of decode workers."""
    mixed: Count = 0
    """Set the number of workers that do both prefill and decode. Use --prefill 0 --decode 0 --mixed 1 for one
    worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerConfig:
    """The planner, which changes the number of workers of each role so that the targets of `slo` are met."""

    mode: Literal["explain", "act"] = "explain"
    """Choose whether the planner changes the cluster. explain only decides and logs the reasons; act carries the
    decisions out."""
    actuator: Literal["serve", "raycluster"] = "serve"
    """Choose how decisions are carried out. serve sets the targets of Ray Serve's autoscaling policy, and Ray's
    autoscaler adds pods; raycluster patches the worker groups of a RayCluster whose own autoscaler is off."""
    model: str = ""
    """Set the name of the model whose workers are planned. Empty means the only model that the cluster serves."""
    interval_s: Positive = 5.0
    """Set the seconds between two decisions."""
    window_s: Positive = 300.0
    """Set the seconds of past demand that a forecast uses. Lower it to follow bursts, raise it for steadier numbers."""
    start_s: Positive = 60.0
    """Set the seconds that a new worker takes until it serves, which is how far the forecast looks ahead. Measure it
    with your model."""
    percentile: Annotated[float, Meta(ge=50, lt=100)] = 99.0
    """Set the percentage of requests that are to meet the targets of slo."""
    headroom: Annotated[float, Meta(ge=0, lt=1)] = 0.15
    """Set the fraction of capacity, from 0 to 1, that is kept free beyond the forecast demand."""
    scale_down_s: NonNegative = 300.0
    """Set the seconds for which fewer workers must have been enough before some are removed."""
    idle_s: Positive = 300.0
    """Set the seconds since the last request after which a pool whose minimum is 0 has no worker any more. The next
    request starts one, and waits for it where gateway.wake_timeout_s is set."""
    change_roles: bool = True
    """Change the role of a running worker instead of starting a new one, where that is enough."""
    min_prefill: Count = 1
    """Set the fewest prefill workers to keep. 0 lets the pool go to 0 workers, see planner.idle_s."""
    max_prefill: Count = 0
    """Limit the number of prefill workers. 0 means no limit."""
    min_decode: Count = 1
    """Set the fewest decode workers to keep. 0 lets the pool go to 0 workers, see planner.idle_s."""
    max_decode: Count = 0
    """Limit the number of decode workers. 0 means no limit."""
    host: str = "127.0.0.1"
    """Set the address on which the planner serves /metrics and /health."""
    metrics_port: OptionalPort = 0
    """Set the TCP port of the planner's /metrics and /health. 0 means any free port; -1 turns them off."""
    kubernetes_namespace: str = ""
    """Set the Kubernetes namespace of the planned objects. Empty means the namespace of the planner's pod, else
    default."""
    rayservice: str = ""
    """Set the name of the RayService whose active RayCluster is planned, for planner.actuator=raycluster."""
    raycluster: str = ""
    """Set the name of the RayCluster to plan where no RayService owns it, for planner.actuator=raycluster. Set this or
    planner.rayservice."""
    groups: str = ""
    """Map roles to worker groups of the RayCluster, as prefill=GROUP,decode=GROUP. GROUP:2+1 means two workers in each
    pod and one spare pod, GROUP/4 means four pods for each worker."""
    lease: str = "tandem-planner"
    """Set the name of the Kubernetes Lease by which several planners elect the one that acts."""
    lease_s: Annotated[float, Meta(ge=3, le=MAX_FLOAT)] = 15.0
    """Set the seconds after which a planner that has not renewed its Lease loses it to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    slo: SloConfig = SloConfig()
    lanes: LanesConfig = LanesConfig()
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
