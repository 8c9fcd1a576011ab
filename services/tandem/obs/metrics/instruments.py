"""List every metric of Tandem.

`gen_ai.*` are names of OpenTelemetry's semantic conventions for generative AI, as of 2026 (status: development). In
Prometheus dots become underscores, the unit becomes a suffix and a counter ends in `_total`, so `tandem.step.duration`
is `tandem_step_duration_seconds`. Unit "1" marks ratios; values that are 0 or 1 have no unit."""

from __future__ import annotations

from tandem.obs.metrics.instrument import Instrument, counter, gauge, histogram

LATENCY = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
"""Bucket bounds in seconds, for times to a first token, of requests and of their stages."""
GAP = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5),
)
"""Bucket bounds in seconds, for times between two tokens and of steps."""
TOKENS = tuple(4.0**power for power in range(10))

MODEL = "gen_ai.request.model"
_GEN_AI = ("gen_ai.operation.name", MODEL, "tenant", "lane")

# ---- what clients see: gateway

TIME_TO_FIRST_TOKEN = histogram(
    "gen_ai.server.time_to_first_token", "s", "From a request's arrival to its first token.", LATENCY, *_GEN_AI
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time per output token of a finished request, without the first.",
    GAP,
    *_GEN_AI,
)
REQUEST_DURATION = histogram(
    "gen_ai.server.request.duration", "s", "From a request's arrival to its end.", LATENCY, *_GEN_AI, "error.type"
)
TOKEN_USAGE = histogram(
    "gen_ai.client.token.usage", "{token}", "Tokens of a request.", TOKENS, *_GEN_AI, "gen_ai.token.type"
)
INTER_TOKEN_LATENCY = histogram(
    "tandem.inter_token_latency", "s", "Between two tokens of a choice, as sent by the gateway.", GAP, "lane", MODEL
)

# ---- requests: gateway

REQUESTS = counter("tandem.requests", "{request}", "Requests that ended.", "endpoint", "outcome", "lane", "tenant")
HTTP_RESPONSES = counter("tandem.http.responses", "{response}", "HTTP responses.", "status")
OPEN_REQUESTS = gauge("tandem.open_requests", "{request}", "Requests that have not ended.")
QUEUED_REQUESTS = gauge("tandem.queued_requests", "{request}", "Requests that wait in the gateway's queue.", "lane")
PROMPT_TOKENS = counter("tandem.prompt_tokens", "{token}", "Prompt tokens of admitted requests.", "path", "tenant")
CACHED_PROMPT_TOKENS = counter(
    "tandem.cached_prompt_tokens", "{token}", "Prompt tokens that a prefix cache had.", "path", "tenant"
)
OUTPUT_TOKENS = counter("tandem.output_tokens", "{token}", "Output tokens sent to clients.", "path", "tenant")
STAGE_DURATION = histogram(
    "tandem.request.stage.duration", "s", "Time of a request in one of its stages.", LATENCY, "stage", "lane", MODEL
)
ADMISSIONS = counter(
    "tandem.admissions", "{request}", "Requests admitted or refused, and why.", "decision", "reason", "lane", "tenant"
)
PLACEMENTS = counter("tandem.placements", "{request}", "Where requests went, and why.", "path", "reason")
RETRIES = counter("tandem.request.retries", "{retry}", "Further attempts of requests after a failed or migrated one.")
SLO_REQUESTS = counter(
    "tandem.slo.requests",
    "{request}",
    "Requests of a lane with a target that finished, or failed without their clients' fault.",
    "lane",
    "slo",
    "met",
)
SLO_TARGET = gauge("tandem.slo.target", "s", "Latency target of a lane.", "lane", "slo")

# ---- tenants: gateway

TENANT_OPEN_REQUESTS = gauge("tandem.tenant.open_requests", "{request}", "Requests that have not ended.", "tenant")
TENANT_QUOTA_LEFT = gauge(
    "tandem.tenant.quota.left", "1", "Part of a limit that was left at the last reply of Redis.", "tenant", "limit"
)
QUOTAS_SHARED = gauge("tandem.quotas.shared", "", "Whether quotas are kept in Redis, not by each gateway alone.")

# ---- workers, as a gateway sees them

READY = gauge("tandem.ready", "", "Whether the gateway can serve requests.")
MODEL_SHORTAGE = gauge(
    "tandem.model.shortage",
    "",
    "1: the model lacks what `gateway.disaggregation` needs: a worker, a prefill or decode worker, or a link.",
    MODEL,
    "lacks",
)
SERVED_MODELS = gauge("tandem.served_models", "{model}", "Models that live workers serve.")
LIVE_WORKERS = gauge("tandem.live_workers", "{worker}", "Live workers.", "pool")
WORKER_BREAKER = gauge(
    "tandem.worker.breaker",
    "",
    "1: open, the worker's last jobs failed and it gets none; 0.5: half-open, the worker is being tried.",
    "worker",
)
TRANSFER_LINKS = gauge(
    "tandem.transfer.links",
    "{link}",
    "Links over which one worker reads another, by type and by whether they meet their requirements.",
    "link",
    "ok",
)
PREFIX_INDEX_REACHABLE = gauge("tandem.prefix.index.reachable", "", "Whether the prefix index can be read.")
PREFIX_INDEX_WORKERS = gauge("tandem.prefix.index.workers", "{worker}", "Workers whose blocks are mirrored.")
PREFIX_INDEX_WORKERS_EXPECTED = gauge(
    "tandem.prefix.index.workers_expected", "{worker}", "Workers whose blocks have to be loaded from a snapshot."
)
PREFIX_INDEX_BLOCKS = gauge("tandem.prefix.index.blocks", "{block}", "Blocks in the mirror of the prefix index.")
PREFIX_INDEX_BYTES = gauge("tandem.prefix.index.size", "By", "Memory of the mirror of the prefix index.")
PREFIX_PREDICTED_TOKENS = counter(
    "tandem.prefix.predicted_tokens", "{token}", "Prompt tokens that the prefix index predicted to be cached."
)
PREFIX_STALE_HIT_TOKENS = counter("tandem.prefix.stale_hit_tokens", "{token}", "Predicted tokens that were not cached.")
REDIS_UP = gauge("tandem.redis.up", "", "Whether Redis executes this process' commands.")
REDIS_ERRORS = counter("tandem.redis.errors", "{command}", "Commands that Redis did not execute.", "store")

# ---- steps: worker

STEPS = counter("tandem.steps", "{step}", "Steps that ran: prefill, decode, or mixed.", "kind")
STEP_DURATION = histogram("tandem.step.duration", "s", "From the planning of a step to its results.", GAP, "kind")
STEP_PREDICTED_DURATION = histogram(
    "tandem.step.predicted_duration", "s", "Step duration as predicted by the step time model.", GAP, "kind"
)
STEP_PREFILL_TOKENS = counter("tandem.step.prefill_tokens", "{token}", "Prompt tokens that steps computed.")
STEP_DECODE_TOKENS = counter("tandem.step.decode_tokens", "{token}", "Sequences that steps decoded, summed.")
STEP_BUDGET_TOKENS = counter(
    "tandem.step.budget_tokens", "{token}", "Prompt tokens that the token budget of steps allowed."
)
STEPS_SATURATED = counter("tandem.step.saturated", "{step}", "Steps whose token budget for prompts was used up.")
STEPS_OVER_TARGET = counter(
    "tandem.step.over_target", "{step}", "Steps that could not be planned to end within their latency target."
)
PREEMPTIONS = counter("tandem.preemptions", "{sequence}", "Sequences that were preempted and lost their KV blocks.")
SEQUENCES = gauge("tandem.sequences", "{sequence}", "Sequences of the engine, by state.", "state")
QUEUED_TOKENS = gauge(
    "tandem.queued_tokens", "{token}", "Prompt tokens that were accepted but not computed yet.", "lane"
)
DRAFTED_TOKENS = counter("tandem.speculative.drafted_tokens", "{token}", "Draft tokens of speculative decoding.")
ACCEPTED_TOKENS = counter("tandem.speculative.accepted_tokens", "{token}", "Draft tokens that were accepted.")

# ---- KV: worker

KV_CAPACITY = gauge("tandem.kv.capacity", "{block}", "Blocks of the pool.")
KV_BLOCKS = gauge(
    "tandem.kv.blocks",
    "{block}",
    "KV blocks by state. `cached` blocks are also `free`; `quarantined` ones wait until no transfer can write to them;"
    " `host` ones are in host memory, outside the pool.",
    "state",
)
KV_UNUSED = gauge("tandem.kv.free_ratio", "1", "Part of the pool that a new sequence could use.")
LEASES = gauge("tandem.leases", "{lease}", "Prefills whose KV is held for a consumer.")
PULLS = gauge("tandem.pulls", "{pull}", "Hand-offs whose KV is being pulled.")
PREFIX_QUERIED_TOKENS = counter("tandem.prefix.queried_tokens", "{token}", "Prompt tokens looked up in the cache.")
PREFIX_HIT_TOKENS = counter("tandem.prefix.hit_tokens", "{token}", "Prompt tokens that the cache had.")
PREFIX_REMOTE_HIT_TOKENS = counter(
    "tandem.prefix.remote_hit_tokens", "{token}", "Prompt tokens whose KV was read from another worker's cache."
)

# ---- transfer: worker

TRANSFERS = counter(
    "tandem.transfers", "{transfer}", "Pulls that ended: KV of a hand-off, or a prefix.", "kind", "outcome"
)
TRANSFER_BYTES = counter("tandem.transfer.bytes", "By", "Bytes read by pulls.", "kind", "transport")
TRANSFER_EXPOSED_BYTES = counter(
    "tandem.transfer.exposed_bytes",
    "By",
    "Bytes that were unread when the last chunk was computed.",
    "kind",
    "transport",
)
TRANSFER_BUSY = counter("tandem.transfer.busy", "s", "Time during which a read was in progress.", "kind", "transport")
TRANSFER_DURATION = histogram(
    "tandem.transfer.duration", "s", "From the first announced block to the last verified one.", LATENCY, "kind"
)
TRANSFER_EXPOSED_DURATION = histogram(
    "tandem.transfer.exposed_duration", "s", "From the last announced block to the last verified one.", LATENCY, "kind"
)

# ---- jobs and state: worker

JOBS = counter("tandem.jobs", "{job}", "Jobs that ended, with all their choices.", "kind", "outcome")
JOB_QUEUE_DURATION = histogram(
    "tandem.job.queue.duration",
    "s",
    "From a job's acceptance, or the arrival of the KV that it waits for, to its first step.",
    LATENCY,
    "kind",
)
GENERATED_TOKENS = counter("tandem.generated_tokens", "{token}", "Tokens sampled by this worker.")
WORKER_HEALTHY = gauge("tandem.worker.healthy", "", "Whether the worker can run jobs.")
WORKER_DRAINING = gauge("tandem.worker.draining", "", "Whether the worker is draining and takes no new jobs.")
WORKER_GATEWAYS = gauge("tandem.worker.gateways", "{gateway}", "Gateways that watch the worker, or did a moment ago.")
WORKER_INFO = gauge(
    "tandem.worker.info", "", "Always 1; attributes describe the worker.", "worker", "pool", "model", "transport"
)

# ---- planner

PLANNER_TARGET = gauge("tandem.planner.target", "{worker}", "Desired number of workers, as last decided.", "role")
PLANNER_NEEDED = gauge(
    "tandem.planner.needed", "{worker}", "Desired number of workers before bounds and stabilization.", "role"
)
PLANNER_WORKERS = gauge("tandem.planner.workers", "{worker}", "Workers by state at the last decision.", "role", "state")
PLANNER_DECISIONS = counter("tandem.planner.decisions", "{decision}", "Decisions by outcome.", "outcome")
PLANNER_HELD_BACK = gauge(
    "tandem.planner.held_back", "", "Whether the planner lacks data and therefore changes nothing."
)
PLANNER_LEADER = gauge("tandem.planner.leader", "", "Whether this planner is the leader, whose decisions are applied.")
PLANNER_ACTUATOR_ERRORS = counter(
    "tandem.planner.actuator.errors", "{call}", "Calls to the Kubernetes API that failed, by HTTP status.", "status"
)

# ---- every process

PROCESS_CPU = counter("process.cpu.time", "s", "Processor time of the process.")
PROCESS_MEMORY = gauge("process.memory.usage", "By", "Resident memory of the process.")
PROCESS_FILES = gauge("process.open_file_descriptor.count", "{file}", "Open file descriptors.")
SPANS_DROPPED = counter("tandem.span.dropped", "{span}", "Spans dropped because too many waited to be sent.")
LOG_LINES_DROPPED = counter("tandem.log.dropped", "{line}", "Log lines dropped because too many were alike.")


def all_instruments() -> tuple[Instrument, ...]:
    return tuple(value for value in globals().values() if isinstance(value, Instrument))
