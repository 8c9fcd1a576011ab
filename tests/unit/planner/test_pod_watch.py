"""Test the pod watch on a source that misbehaves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kubernetes import client, config

from tandem.planner.kube_client import KubeApi
from tandem.planner.kube_error import Backoff, KubeError
from tandem.planner.pod_watch import Pod, PodEvent, PodInformer
from tests.unit.planner.rig import eventually
from tests.unit.planner.world import Tick

POD = Pod(name="a", group="g", ip="10.0.0.1", is_ending=False)


class Ends:
    """Stream without events that ends at once."""

    def __iter__(self) -> Iterator[PodEvent]:
        return iter(())

    def cut(self) -> None:
        pass


class Source:
    """Pod source that first runs `fault` in each call."""

    def __init__(self, fault: Callable[[str], None]) -> None:
        self._fault = fault

    def list_pods(self, selector: str) -> tuple[list[Pod], str]:
        self._fault("list")
        return [POD], "1"

    def watch_pods(self, selector: str, version: str, window_s: int) -> Ends:
        self._fault("watch")
        return Ends()


class Pauses:
    """Random source of a backoff that counts its pauses."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self) -> float:
        self.number += 1
        return 0.0


@contextmanager
def watching(source: Source, pauses: Pauses) -> Iterator[PodInformer]:
    watch = PodInformer(source, "s", Tick(), Backoff(pauses, first_s=0.001, most_s=0.01))
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


async def test_a_watch_that_ends_at_once_is_begun_again_after_a_pause() -> None:
    calls: list[str] = []
    pauses = Pauses()
    with watching(Source(calls.append), pauses):
        await eventually(lambda: pauses.number >= 3)
    assert calls[:2] == ["list", "watch"] and calls.count("list") == 1
    assert calls.count("watch") == pauses.number


@pytest.mark.parametrize("error", [KeyError("metadata"), RuntimeError("no token"), KubeError(410, "gone")], ids=repr)
async def test_whatever_fails_is_tried_again(error: Exception) -> None:
    failures = [("list", error), ("watch", error), ("watch", error)]
    pauses = Pauses()

    def fail(call: str) -> None:
        if failures and failures[0][0] == call:
            raise failures.pop(0)[1]

    with watching(Source(fail), pauses) as watch:
        await eventually(lambda: not failures and watch.pods() == (POD,) and watch.problem == "")
        assert pauses.number >= 3


@pytest.mark.slow
def test_a_token_that_is_not_there_is_a_failed_call() -> None:
    def missing(settings: client.Configuration) -> None:
        raise config.ConfigException("no token")

    settings: Any = client.Configuration(host="http://127.0.0.1:9", api_key={"authorization": "old"})
    settings.refresh_api_key_hook = missing
    api = KubeApi(settings, "default", "p1", 1.0)
    with pytest.raises(KubeError, match="no token"):
        api.list_pods("s")
    api.close()
