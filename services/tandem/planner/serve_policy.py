"""Give Ray Serve's autoscaling the number of replicas of one role that the planner has published.

Serve's controller calls the policy ten times a second between its other work. So that a call does not wait for Redis, a
thread queries the target and the call returns the thread's last result. Serve copies this module by value into its
controller, so the module keeps no state outside the class.
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
from tandem.core.settings import build, from_environment
from tandem.planner.serve_name import serve_name
from tandem.stores.replica_targets import ROLES, ReplicaTargets
from tandem.stores.settings_file import read_settings

REFRESH_S = 1.0
STALE_S = 60.0
"""Age in seconds at which the last result is ignored, because Redis has not been available."""


class _Found(NamedTuple):
    """Result of one query. `number` is None if no target is published, or if another Serve has workers of the role too,
    so that the target is not the number of either."""

    number: int | None
    at: float


class _Known:
    """Values shared by the thread and the calls; each field has one writer."""

    def __init__(self) -> None:
        self.found: _Found | None = None
        self.deployed: int | None = None


class ReplicaPolicy:
    """Autoscaling policy for Ray Serve's `autoscaling_config` that returns the planner's target for one role.

    Serve builds it with its `policy_kwargs` and calls it with an AutoscalingContext. `role`: role of the deployment's
    pool. `config`: path of the settings file of the cluster's programs, which gives the address of Redis and, unless
    `model` is given, the name of the served model; environment variables override the file. While another Serve has
    workers of the role too, as during an upgrade to a new cluster, the number of replicas does not change. Raises
    ValueError for an unknown role."""

    def __init__(self, role: str, config: str = "", model: str = "") -> None:
        if role not in ROLES:
            raise ValueError(f"role must be one of {', '.join(ROLES)}, not {role!r}")
        self._known = _Known()
        self._clock = SystemClock()
        stop = Event()
        arguments = (self._known, stop, role, config, model)
        Thread(target=_refresh, args=arguments, name=f"tandem-target-{role}", daemon=True).start()
        # Serve builds a new policy for each deployment of the application, and drops the old one without a call.
        weakref.finalize(self, stop.set)

    def __call__(self, ctx: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas: the planner's target, within the bounds of Serve's AutoscalingContext `ctx`.

        Without a recent target the number does not change."""
        self._known.deployed = ctx.target_num_replicas
        found = self._known.found
        number: int = ctx.target_num_replicas
        if found is not None and found.number is not None and self._clock.now() - found.at < STALE_S:
            number = found.number
        least, most = ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas
        return max(least, min(most, number)), {}


replicas = ReplicaPolicy
"""Name by which `policy_function` in Serve's `autoscaling_config` refers to the policy."""


def _refresh(known: _Known, stop: Event, role: str, path: str, model: str) -> None:
    """Query the target until `stop`, also after errors."""
    log = logging.getLogger("ray.serve")
    problem = ""
    while not stop.is_set():
        try:
            asyncio.run(_follow(known, stop, role, path, model))
        except Exception as error:
            if str(error) != problem:
                log.warning(
                    "Ray Serve keeps the number of %s workers: the planner's target is unreadable: %s", role, error
                )
            problem = str(error)
        stop.wait(REFRESH_S)


async def _follow(known: _Known, stop: Event, role: str, path: str, model: str) -> None:
    """Query the target until `stop`, or until the settings file changes: a ConfigMap may change under a running
    controller."""
    clock, written = SystemClock(), _written(path)
    config = _read(path)
    model = model or config.planner.model or config.model.served_names[0]
    targets = ReplicaTargets(config.redis.url, config.redis.namespace)
    try:
        while not stop.is_set() and _written(path) == written:
            known.found = _Found(await _exchange_target(targets, model, role, known.deployed), clock.now())
            await asyncio.to_thread(stop.wait, REFRESH_S)
    finally:
        await targets.close()


async def _exchange_target(targets: ReplicaTargets, model: str, role: str, deployed: int | None) -> int | None:
    """Publish how many replicas this Serve intends to have, and return the planner's target, None if it does not apply.

    Raises StoreUnavailable.
    """
    me = serve_name()
    if deployed is not None:
        await targets.publish_deployed(model, role, me, deployed)
    target, serves = await targets.read(model), (await targets.deployed(model)).get(role, {})
    is_alone = {*serves} <= {me}
    return target.replicas.get(role) if target is not None and is_alone else None


def _written(path: str) -> tuple[int, int] | None:
    """Return the identity and modification time of the settings file; None without a path. Raises OSError."""
    if not path:
        return None
    found = Path(path).stat()
    return found.st_ino, found.st_mtime_ns


def _read(path: str) -> Config:
    """Read the settings. Raises TandemError."""
    layers = [(path, read_settings(Path(path)))] if path else []
    return build([*layers, ("environment", from_environment(os.environ))])
