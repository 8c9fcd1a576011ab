"""Register the gauges that read the current state of the gateway's parts when metrics are exported.

The export reads on its own thread while the event loop runs, so that every reader copies a table before iterating.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tandem.gateway.orchestration.driver import RequestDriver
from tandem.gateway.prefix.prefix_index_client import PrefixIndexClient
from tandem.gateway.telemetry.request_recorder import RequestRecorder
from tandem.gateway.tenants.quotas import TenantQuotas
from tandem.obs.metrics import instruments as have
from tandem.obs.metrics.metrics import Metrics, Values
from tandem.routing.circuit_breaker import BreakerState
from tandem.routing.pd_pairs import PairRegistry
from tandem.stores.redis_client import RedisHealth

_BREAKER = {BreakerState.CLOSED: 0.0, BreakerState.TRIAL: 0.5, BreakerState.OPEN: 1.0}


def watch_answers(metrics: Metrics, recorder: RequestRecorder) -> None:
    metrics.watch(have.OPEN_REQUESTS, _one(lambda: recorder.num_open))
    metrics.watch(
        have.TENANT_OPEN_REQUESTS, lambda: {(tenant,): n for tenant, n in recorder.num_open_by_tenant().items()}
    )


def watch_dispatch(metrics: Metrics, dispatch: RequestDriver) -> None:
    metrics.watch(have.QUEUED_REQUESTS, lambda: {(lane.label,): n for lane, n in dispatch.num_queued().items()})
    metrics.watch(have.HELD_REQUESTS, lambda: {(model,): n for model, n in dispatch.num_held().items()})
    metrics.watch(
        have.FAIRNESS_INDEX,
        lambda: {(model, lane.label): index for (model, lane), index in dispatch.fairness().items()},
    )
    metrics.watch(have.WAKEABLE_MODELS, lambda: {(pool,): n for pool, n in dispatch.num_wakeable().items()})
    metrics.watch(have.REBALANCE_MOVES, lambda: {(outcome,): n for outcome, n in dispatch.num_moves().items()})
    metrics.watch(have.SERVED_MODELS, _one(lambda: len(dispatch.models())))
    metrics.watch(have.READY, _one(lambda: dispatch.ready() is None))
    metrics.watch(have.MODEL_SHORTAGE, lambda: {(found.model, found.lacks): 1.0 for found in dispatch.shortages()})
    metrics.watch(have.LIVE_WORKERS, lambda: {(pool,): n for pool, n in dispatch.num_live().items()})
    metrics.watch(
        have.WORKER_BREAKER, lambda: {(worker,): _BREAKER[state] for worker, state in dispatch.breakers().items()}
    )


def watch_grammars(metrics: Metrics, num_waiting: Callable[[], int]) -> None:
    metrics.watch(have.WAITING_GRAMMARS, _one(num_waiting))


def watch_prefixes(metrics: Metrics, prefixes: PrefixIndexClient) -> None:
    table, hits = prefixes.table, prefixes.false_hits
    for instrument, read in (
        (have.PREFIX_INDEX_REACHABLE, lambda: prefixes.is_reachable),
        (have.PREFIX_INDEX_WORKERS, lambda: table.num_workers),
        (have.PREFIX_INDEX_WORKERS_EXPECTED, lambda: prefixes.num_unloaded_workers),
        (have.PREFIX_INDEX_BLOCKS, lambda: table.num_blocks),
        (have.PREFIX_INDEX_BYTES, lambda: table.num_bytes),
        (have.PREFIX_PREDICTED_TOKENS, lambda: hits.num_predicted),
        (have.PREFIX_STALE_HIT_TOKENS, lambda: hits.num_missed),
    ):
        metrics.watch(instrument, _one(read))


def watch_links(metrics: Metrics, pairs: PairRegistry) -> None:
    metrics.watch(
        have.TRANSFER_LINKS,
        lambda: {(link, "true" if is_ok else "false"): n for (link, is_ok), n in pairs.links().items()},
    )


def watch_redis(metrics: Metrics, health: RedisHealth) -> None:
    metrics.watch(have.REDIS_UP, _one(lambda: health.is_up))
    metrics.watch(have.REDIS_ERRORS, lambda: {(store,): n for store, n in health.num_errors.copy().items()})


def watch_quotas(metrics: Metrics, quotas: TenantQuotas) -> None:
    metrics.watch(have.QUOTAS_SHARED, _one(lambda: quotas.is_reachable))
    metrics.watch(have.TENANT_QUOTA_LEFT, quotas.left)


def _one(read: Callable[[], float]) -> Callable[[], Mapping[Values, float]]:
    """Make the reader of a gauge that has a single series without attributes."""
    return lambda: {(): float(read())}
