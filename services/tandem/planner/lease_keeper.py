"""Renew a Kubernetes Lease while the planner runs, or wait to take it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tandem.core.clock import Clock
from tandem.planner.kube_error import KubeError
from tandem.planner.leader_election import Election

if TYPE_CHECKING:
    from tandem.planner.kube_client import KubeApi

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LeaseKeeper:
    """Takes and renews the Lease `name` for this planner whenever `election` allows it.

    `run` tries this at intervals until it is stopped; `look` tries it once. `api`: the client with which the Lease is
    read and written. `find_owner` reads what the planner scales and returns a reference to it, so that the server
    deletes the Lease together with it; it may raise KubeError. `on_failure` is called with the error of each failed
    call, except for conflicts with another planner. An error that repeats is logged at DEBUG."""

    election: Election
    api: KubeApi
    name: str
    clock: Clock
    find_owner: Callable[[], Mapping[str, Any]]
    on_failure: Callable[[KubeError], None]
    _did_lead: bool = field(default=False, init=False)
    _problem: str = field(default="", init=False)

    @property
    def leads(self) -> bool:
        """Return whether this planner may send requests for changes now."""
        return self.election.leads(self.clock.now())

    async def run(self, stopped: asyncio.Event) -> None:
        """Renew or take the Lease at intervals until `stopped` is set.

        The Lease is not given up at the end, because a decision may still be in progress; call `resign` for that."""
        while not stopped.is_set():
            await asyncio.to_thread(self.look)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), self.election.period_s)

    def look(self) -> None:
        """Read the Lease once, and renew or take it if the election allows that.

        Blocks for up to three calls of the API server. A failed call is logged and passed to `on_failure`, not raised.
        """
        try:
            self._look()
            self._problem = ""
        except KubeError as error:
            if not error.is_conflict:  # a conflict means that another planner was faster
                self._report(error)
        self._log_leadership()

    def resign(self) -> None:
        released = self.election.resigned()
        if released is None:
            return
        try:
            self.api.replace_lease(self.name, released)
            _log.info("this planner released lease %s", self.name)
        except KubeError as error:
            message = "this planner cannot release lease %s, so the next planner waits until it expires: %s"
            _log.info(message, self.name, error)

    def _look(self) -> None:
        election, clock = self.election, self.clock
        seen = self.api.read_lease(self.name)
        sent_at = clock.now()
        if seen is None:
            created = self.api.create_lease(self.name, election.me, election.lease_s, self.find_owner())
            election.claimed(created, sent_at, clock.now())
            return
        election.saw(seen, clock.now())
        claim = election.claim(sent_at)
        if claim is not None:
            if not claim.owners:
                claim = replace(claim, owners=(self.find_owner(),))
            election.claimed(self.api.replace_lease(self.name, claim), sent_at, clock.now())

    def _report(self, error: KubeError) -> None:
        self.on_failure(error)
        level = logging.ERROR if error.is_invalid else logging.WARNING
        if str(error) == self._problem:
            level = logging.DEBUG
        self._problem = str(error)
        _log.log(level, "this planner can neither take nor renew lease %s: %s", self.name, error)

    def _log_leadership(self) -> None:
        leads = self.leads
        if leads != self._did_lead:
            if leads:
                _log.info("this planner leads, because it holds lease %s", self.name)
            else:
                _log.info("this planner does not lead any more: %r holds lease %s", self.election.holder, self.name)
        self._did_lead = leads
