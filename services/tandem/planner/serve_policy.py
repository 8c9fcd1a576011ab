"""How many replicas Ray Serve is to run of one role, as the planner has said; never asks anybody while Serve waits.

Serve's controller calls it ten times a second, between all else that it does, so a thread asks Redis and the call reads
what that has found. Serve copies this module by value into its controller, so nothing of it lives outside the class.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from tandem.core.clock import SystemClock
from tandem.core.config import Config
from tandem.core.settings import DEFAULT_LAYER, from_environment, resolve
from tandem.planner.serve_name import serve_name
from tandem.stores.replica_targets import ROLES, ReplicaTargets
from tandem.stores.settings_file import read_settings

REFRESH_S = 1.0
STALE_S = 60.0
"""What was read last so long ago does not count: Redis has been away."""


class _Found(NamedTuple):
    """`number` is None where nobody says one, or where another Serve has such workers too: what is said is no number
    for either of them."""

    number: int | None
    at: float


class _Known:
    """Between the thread and the calls; each field has one writer."""

    def __init__(self) -> None:
        self.found: _Found | None = None
        self.deployed: int | None = None


class ReplicaPolicy:
    """A policy as Serve's `autoscaling_config` names it, made once with its `policy_kwargs`.

    `role` of the deployment's pool. `config`: the file of settings that the cluster's programs have, of which it takes
    `redis` and, unless `model` says it, the served model's name; the environment goes before it. Beside another Serve
    that has such workers, as in an upgrade to a new cluster, the number stays. Raises ValueError for another role.
    """

    def __init__(self, role: str, config: str = "", model: str = "") -> None:
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        self._known = _Known()
        self._clock = SystemClock()
        stop = Event()
        arguments = (self._known, stop, role, config, model)
        Thread(target=_refresh, args=arguments, name=f"tandem-target-{role}", daemon=True).start()
        # Serve makes a new one for each deployment of the application, and drops the old one without a word.
        weakref.finalize(self, stop.set)

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Of Serve's AutoscalingContext. What is not known, or too old, leaves the number as it is."""
        self._known.deployed = ctx.target_num_replicas
        found = self._known.found
        number: int = ctx.target_num_replicas
        if found is not None and found.number is not None and self._clock.now() - found.at < STALE_S:
            number = found.number
        least, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return max(least, min(most, number)), {}


replicas = ReplicaPolicy
"""The name by which `policy_function` finds it."""


def _refresh(known: _Known, stop: Event, role: str, path: str, model: str) -> None:
    """Until `stop`. Whatever fails is tried again."""
    log = logging.getLogger("ray.serve")
    problem = ""
    while not stop.is_set():
        try:
            asyncio.run(_follow(known, stop, role, path, model))
        except Exception as error:
            if str(error) != problem:
                log.warning("the planner's target for %s cannot be read: %s", role, error)
            problem = str(error)
        stop.wait(REFRESH_S)


async def _follow(known: _Known, stop: Event, role: str, path: str, model: str) -> None:
    """Until `stop`, or until the file of settings is another one: a ConfigMap may change below a running controller."""
    clock, written = SystemClock(), _written(path)
    config = _read(path)
    model = model or config.planner.model or config.model.served_names[0]
    targets = ReplicaTargets(config.redis.url, config.redis.namespace)
    try:
        while not stop.is_set() and _written(path) == written:
            known.found = _Found(await _ask(targets, model, role, known.deployed), clock.now())
            await asyncio.to_thread(stop.wait, REFRESH_S)
    finally:
        await targets.close()


async def _ask(targets: ReplicaTargets, model: str, role: str, deployed: int | None) -> int | None:
    """The number that counts, once others have been told what this Serve means to have. Raises TargetsUnavailable."""
    me = serve_name()
    if deployed is not None:
        await targets.publish_deployed(model, role, me, deployed)
    said, serves = await targets.read(model), (await targets.deployed(model)).get(role, {})
    is_alone = {*serves} <= {me}
    return said.replicas.get(role) if said is not None and is_alone else None


def _written(path: str) -> tuple[int, int] | None:
    """Which file it is, and when it was written; None where there is none. Raises OSError."""
    if not path:
        return None
    found = Path(path).stat()
    return found.st_ino, found.st_mtime_ns


def _read(path: str) -> Config:
    """Raises TandemError."""
    layers: list[tuple[str, dict[str, Any]]] = [(DEFAULT_LAYER, {})]
    if path:
        layers.append((path, read_settings(Path(path))))
    return resolve([*layers, ("environment", dict(from_environment(os.environ)))]).config
