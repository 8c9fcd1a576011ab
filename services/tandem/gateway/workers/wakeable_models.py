"""Find the models for which a planner starts workers when requests wait, also while no worker serves them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set

from tandem.core.clock import Clock, wall_ns
from tandem.core.errors import TandemError
from tandem.gateway.context.interfaces import ServedModel
from tandem.gateway.context.supervise import BackgroundLoop
from tandem.gateway.text.text_models import TextModels
from tandem.stores.model_registry import ModelRecord, ModelRegistry
from tandem.stores.redis_client import StoreUnavailable
from tandem.stores.replica_targets import ReplicaTargets

log = logging.getLogger(__name__)
PERIOD_S = 1.0
PUBLISH_PERIOD_S = 3600.0
"""Seconds after which the record of a model is published again, so that it does not expire."""


class WakeableModels:
    """Publish the models of live workers in Redis, and find out which models a planner can wake, that is, for which it
    starts workers when requests wait; both every PERIOD_S seconds. `live`: function that returns the models of live
    workers, by name.

    A planner that acts publishes its target number of workers of a model every few seconds; the model can be woken as
    long as Redis has that target. The tokenizer comes from a live worker or, for a model whose workers were gone before
    this gateway started, from Redis. While Redis is unreachable the last result stays in force. `texts` must have been
    made with `keep_bundles`, because the tokenizer bundles are published too.
    """

    def __init__(
        self,
        live: Callable[[], Mapping[str, ServedModel]],
        registry: ModelRegistry,
        targets: ReplicaTargets,
        texts: TextModels,
        clock: Clock,
    ) -> None:
        self._live = live
        self._registry = registry
        self._targets = targets
        self._texts = texts
        self._clock = clock
        self._known: dict[str, ServedModel] = {}
        self._stored: dict[str, ModelRecord] | None = None
        """Records that were read from Redis and are not in `_known`; None before they were read."""
        self._published: dict[str, tuple[ModelRecord, float]] = {}
        """The record that was published of each model, and when, in seconds of the clock."""
        self._models: Mapping[str, ServedModel] = {}
        self._optional_roles: Mapping[str, Set[str]] = {}
        self._loop = BackgroundLoop("the search for models that a planner can wake", self._step)
        self.start = self._loop.start

    def models(self) -> Mapping[str, ServedModel]:
        """Return the models that a planner can wake, by name, whether or not workers serve them now."""
        return self._models

    def optional_roles(self) -> Mapping[str, Set[str]]:
        """Return, for each model that a planner can wake, the roles for which the planner's minimum is 0 workers. A
        model without such a role has an empty set."""
        return self._optional_roles

    async def stop(self) -> None:
        await self._loop.stop()
        await self._registry.close()
        await self._targets.close()

    async def _step(self) -> float:
        self._known.update(self._live())
        try:
            await self._search()
            for model in list(self._known.values()):
                await self._publish(model)
        except StoreUnavailable:  # `RedisHealth` reports it. Redis may be back without what was published.
            self._published.clear()
        return PERIOD_S

    async def _search(self) -> None:
        if self._stored is None:
            self._stored = {record.name: record for record in await self._registry.read()}
        found: dict[str, ServedModel] = {}
        optional_roles: dict[str, Set[str]] = {}
        for name in sorted({*self._known, *self._stored}):
            target = await self._targets.read(name)
            if target is not None and (model := await self._find(name)) is not None:
                found[name] = model
                optional_roles[name] = {role for role, minimum in target.minimums.items() if minimum == 0}
        self._models, self._optional_roles = found, optional_roles

    async def _find(self, name: str) -> ServedModel | None:
        """Return the model with this name, whose tokenizer is loaded if it is only in Redis; None if that fails."""
        record = None if self._stored is None else self._stored.pop(name, None)
        if name not in self._known and record is not None:
            try:
                text = await self._texts.load(record.bundle.digest, record.bundle)
            except TandemError as error:
                log.warning("the tokenizer of model %s in Redis cannot be used: %s", name, error.message)
            else:
                created = wall_ns() // 10**9
                self._known[name] = ServedModel(name, record.max_model_len, text, created, record.aliases)
        return self._known.get(name)

    async def _publish(self, model: ServedModel) -> None:
        """Publish the record of a model where it has changed or is old. Raises StoreUnavailable."""
        bundle = self._texts.bundle(model.text.digest)
        record = ModelRecord(name=model.name, max_model_len=model.max_model_len, bundle=bundle, aliases=model.aliases)
        now = self._clock.now()
        last, published_at = self._published.get(model.name, (None, now))
        if record != last or now - published_at >= PUBLISH_PERIOD_S:
            await self._registry.publish(record)
            self._published[model.name] = record, now
