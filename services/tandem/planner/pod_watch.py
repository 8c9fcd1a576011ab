"""Keep the pods of a RayCluster current by a list and a watch on a thread of its own (a Kubernetes informer)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from threading import Event, Lock, Thread
from typing import NamedTuple, Protocol

from tandem.core.clock import Clock
from tandem.planner.kube_error import Backoff, KubeError

WINDOW_S = 20
"""Seconds that one watch lasts; the next watch continues from its end."""
SHORT_S = 1.0
"""A watch that ends sooner than this, even without an error, is repeated only after a delay."""
STALE_S = 60.0
"""Seconds without an event after which the known pods are considered out of date."""

_log = logging.getLogger(__name__)


class Pod(NamedTuple):
    """A pod of the RayCluster.

    `group`: name of its worker group, from the label `ray.io/group`. `ip`: empty while it has none. `is_ending`: it is
    being deleted, or has terminated."""

    name: str
    group: str
    ip: str
    is_ending: bool


class PodEvent(NamedTuple):
    """A change of a pod, from a watch.

    `kind`: ADDED, MODIFIED, DELETED, or BOOKMARK, which has no pod. `version`: resource version after the change."""

    kind: str
    pod: Pod | None
    version: str


class WatchStream(Protocol):
    def __iter__(self) -> Iterator[PodEvent]: ...

    def cut(self) -> None: ...


class PodSource(Protocol):
    """Source of pods, which `kube_client.KubeApi` implements: lists them and watches their changes.

    Methods block and raise KubeError."""

    def list_pods(self, selector: str) -> tuple[list[Pod], str]: ...

    def watch_pods(self, selector: str, version: str, window_s: int) -> WatchStream: ...


class PodInformer:
    """Keeps the list of pods that match the label selector `selector` current, on a thread of its own.

    Call `start`, then `pods` for the current list, and `close` at the end. `source`: lists and watches pods. `backoff`:
    delays after failed calls. `problem`: why the pods are not known, empty if they are."""

    def __init__(self, source: PodSource, selector: str, clock: Clock, backoff: Backoff) -> None:
        self.selector = selector
        self.problem = "its pods have not been listed yet"
        self._source = source
        self._clock = clock
        self._backoff = backoff
        self._pods: dict[str, Pod] = {}
        self._version = ""
        self._updated_at: float | None = None
        self._stream: WatchStream | None = None
        self._lock = Lock()
        self._is_closed = Event()
        self._is_listed = Event()
        self._thread = Thread(target=self._run, name="pod-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Interrupt the watch and wait until the thread has ended. May be called again, or before `start`."""
        self._is_closed.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cut()
        if self._thread.is_alive():
            self._thread.join()

    def pods(self, wait_s: float = 0.0) -> tuple[Pod, ...] | None:
        """Return the current pods, sorted by name; None while they are not known, for the reason in `problem`.

        Blocks for at most `wait_s` seconds until the first list has arrived. The pods also become unknown when nothing
        has been received for `STALE_S` seconds; `problem` may be empty then."""
        self._is_listed.wait(wait_s)
        with self._lock:
            updated_at = self._updated_at
            if updated_at is None or self._clock.now() - updated_at > STALE_S:
                return None
            return tuple(sorted(self._pods.values()))

    def _run(self) -> None:
        while not self._is_closed.is_set():
            try:
                if not self._version:
                    self._list()
                began = self._clock.now()
                self._follow()
                if self._clock.now() - began >= SHORT_S:
                    self._backoff.worked()
                else:
                    self._is_closed.wait(self._backoff.failed())
            except KubeError as error:
                self._failed(error)
            except Exception as error:
                # Any other error is retried too: without this thread no pod change would be seen again.
                self._version = ""
                self._failed(KubeError(0, f"{type(error).__name__}: {error}"))

    def _list(self) -> None:
        pods, version = self._source.list_pods(self.selector)
        with self._lock:
            self._pods = {pod.name: pod for pod in pods}
            self._updated(version)
        self._is_listed.set()

    def _follow(self) -> None:
        stream = self._source.watch_pods(self.selector, self._version, WINDOW_S)
        with self._lock:
            self._stream = stream
            if self._is_closed.is_set():
                stream.cut()
        try:
            for kind, pod, version in stream:
                with self._lock:
                    if pod is not None and kind == "DELETED":
                        self._pods.pop(pod.name, None)
                    elif pod is not None:
                        self._pods[pod.name] = pod
                    self._updated(version)
        finally:
            with self._lock:
                self._stream = None
        with self._lock:
            self._updated(self._version)

    def _updated(self, version: str) -> None:
        self._version = version
        self._updated_at = self._clock.now()
        self.problem = ""

    def _failed(self, error: KubeError) -> None:
        if self._is_closed.is_set():
            return
        if error.is_gone:
            _log.info("the watch of the RayCluster's pods is too far behind, and the planner lists them again")
            self._version = ""
            self._is_closed.wait(self._backoff.failed())
            return
        problem = f"its pods cannot be watched: {error}"
        level = logging.DEBUG if problem == self.problem else logging.WARNING
        with self._lock:
            self.problem = problem
        if not error.is_transient:
            self._version = ""
        delay_s = self._backoff.failed(error.retry_after_s)
        _log.log(level, "the planner cannot watch the RayCluster's pods and tries again in %.1f s: %s", delay_s, error)
        self._is_closed.wait(delay_s)
