"""Serve an HTTP double of a Kubernetes API server: versions, conflicts, selectors, watches that expire, faults on
demand.

The double enforces the rules of the API: a write to a version that is not the newest is a conflict, a JSON Patch is
applied as a whole or not at all, a written object must fit the CRD's schema if that is available, and a watch from a
version that is too old gets Gone. Every call is recorded. It is stricter than Kubernetes in one respect: it refuses
unknown keys, which Kubernetes drops. `api_servers` runs tests on both.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

import jsonschema

from tests.chart import crd
from tests.unit.http_server import QuietHandler, serving

BOOKMARK_S = 0.05
_KINDS = {"rayclusters": "RayCluster", "rayservices": "RayService", "leases": "Lease", "pods": "Pod"}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS subdomain of RFC 1123, which names of these objects must be."""
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of one call. `status` 0: the connection breaks without an answer. `is_late`: the call is carried out
    first."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    who: str
    method: str
    plural: str
    name: str
    status: int
    body: Any = None


class Refused(Exception):
    """Answer with an error. `fields`: those of the object that are invalid; a failed test of a patch names none."""

    def __init__(self, status: int, reason: str, message: str, *fields: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason
        self.details = {"causes": [{"reason": "FieldValueInvalid", "field": field} for field in fields]}


class KubeServer:
    """API server double. `fault` is called before each call; `wrote` is called with client, old and new object of each
    write. Both run under the server's lock."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.fault: Callable[[str, str, str], Fault | None] = lambda method, plural, who: None
        self.wrote: Callable[[str, Object | None, Object], None] = lambda who, before, after: None
        self.lock = threading.RLock()
        self.is_closing = False
        self._objects: dict[tuple[str, str], Object] = {}
        self._events: list[tuple[int, str, Object]] = []
        self._version = 100
        self._oldest = 100

    @property
    def has_schemas(self) -> bool:
        return _validator("rayclusters") is not None

    # ---- as the cluster's own parts

    def put(self, plural: str, name: str, content: Object) -> Object:
        """Write an object whatever its version, as a controller does that has just read it."""
        with self.lock:
            key = (plural, name)
            made = _copied(content)
            made.setdefault("metadata", {})["name"] = name
            if key in self._objects:
                made["metadata"]["uid"] = self._objects[key]["metadata"]["uid"]
            self._stamp(made)
            kind = "MODIFIED" if key in self._objects else "ADDED"
            self._objects[key] = made
            self._notify(kind, made, plural)
            return made

    def delete(self, plural: str, name: str) -> None:
        with self.lock:
            gone = self._objects.pop((plural, name))
            self._stamp(gone)
            self._notify("DELETED", gone, plural)

    def get(self, plural: str, name: str) -> Object:
        with self.lock:
            found = self._objects.get((plural, name))
            if found is None:
                raise Refused(404, "NotFound", f"{plural} {name} not found")
            return _copied(found)

    def names(self, plural: str) -> list[str]:
        with self.lock:
            return [name for kind, name in self._objects if kind == plural]

    def compact(self) -> None:
        """Forget the history: older watches are Gone, the open ones included."""
        with self.lock:
            self._events.clear()
            self._version += 1
            self._oldest = self._version

    def writes(self, plural: str = "rayclusters") -> list[Call]:
        with self.lock:
            calls = list(self.calls)
        return [call for call in calls if call.plural == plural and call.method != "GET" and call.status < 300]

    # ---- as the API

    def read(self, plural: str, name: str, query: dict[str, str]) -> Object:
        if name:
            return self.get(plural, name)
        with self.lock:
            items = [o for (kind, _), o in self._objects.items() if kind == plural and _selected(o, query)]
            version = {"resourceVersion": str(self._version)}
            return {"kind": f"{_KINDS[plural]}List", "metadata": version, "items": _copied(items)}

    def create(self, who: str, plural: str, content: Object) -> Object:
        name = content["metadata"]["name"]
        if not _NAME.fullmatch(name):
            raise Refused(422, "Invalid", f'{_KINDS[plural]} "{name}" is invalid: metadata.name', "metadata.name")
        with self.lock:
            if (plural, name) in self._objects:
                raise Refused(409, "AlreadyExists", f"{plural} {name} already exists")
            self.wrote(who, None, content)
            return self.put(plural, name, content)

    def replace(self, who: str, plural: str, name: str, content: Object) -> Object:
        with self.lock:
            before = self.get(plural, name)
            _require_version(before, content)
            self.wrote(who, before, content)
            return self.put(plural, name, content)

    def remove(self, plural: str, name: str) -> Object:
        with self.lock:
            gone = self.get(plural, name)
            self.delete(plural, name)
            return gone

    def patch(self, who: str, plural: str, name: str, operations: list[Object]) -> Object:
        with self.lock:
            before = self.get(plural, name)
            after = _copied(before)
            for operation in operations:
                _apply(after, operation)
            _require_version(before, after)
            _require_schema(plural, after)
            self.wrote(who, before, after)
            return self.put(plural, name, after)

    def watch(self, plural: str, query: dict[str, str]) -> Iterator[Object]:
        """Yield events until the time is over or the requested version is compacted."""
        position = int(query["resourceVersion"])
        until = time.monotonic() + float(query.get("timeoutSeconds", 60))
        bookmark_at = time.monotonic()
        while time.monotonic() < until and not self.is_closing:
            with self.lock:
                if position < self._oldest:
                    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    yield {"type": "ERROR", "object": gone}
                    return
                news = [event for event in self._events if event[0] > position]
                version = self._version
            for number, kind, content in news:
                position = number
                if content["kind"] == _KINDS[plural] and _selected(content, query):
                    yield {"type": kind, "object": content}
            if not news and query.get("allowWatchBookmarks") and time.monotonic() >= bookmark_at + BOOKMARK_S:
                bookmark_at, position = time.monotonic(), version
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
            time.sleep(0.005)

    # ---- inside

    def _stamp(self, content: Object) -> None:
        self._version += 1
        content["metadata"]["resourceVersion"] = str(self._version)
        content["metadata"].setdefault("uid", f"uid-{self._version}")

    def _notify(self, kind: str, content: Object, plural: str) -> None:
        self._events.append((self._version, kind, {**_copied(content), "kind": _KINDS[plural]}))


def _copied(content: Any) -> Any:
    """Copy an object through JSON, as over the network; faster than `copy.deepcopy`."""
    return json.loads(json.dumps(content))


def _selected(content: Object, query: dict[str, str]) -> bool:
    labels = content["metadata"].get("labels", {})
    required = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(labels.get(key) == value for key, _, value in required)


def _require_version(before: Object, after: Object) -> None:
    version = after["metadata"].get("resourceVersion")
    if version and version != before["metadata"]["resourceVersion"]:
        raise Refused(409, "Conflict", "the object has been modified; please apply your changes to the latest version")


def _apply(content: Object, operation: Object) -> None:
    """Apply one JSON Patch operation (RFC 6902), of the subset that is implemented.

    As in Kubernetes, `replace` adds a key that an object does not have."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = content
    try:
        for part in path:
            place = place[int(part) if isinstance(place, list) else part]
        key: Any = int(last) if isinstance(place, list) else last
        if operation["op"] == "test" and place[key] != operation["value"]:
            raise Refused(422, "Invalid", f"test of {operation['path']} failed")
        if operation["op"] == "replace" and isinstance(place, list):
            place[key]
    except (KeyError, IndexError, ValueError):
        raise Refused(422, "Invalid", f"{operation['path']} is not there") from None
    if operation["op"] in ("add", "replace"):
        place[key] = _copied(operation["value"])
    elif operation["op"] != "test":
        raise Refused(400, "BadRequest", f"no operation {operation['op']}")


@cache
def _validator(plural: str) -> Any:
    """Return a validator that rejects unknown keys; None if the CRDs are not available."""
    path = crd.PLACE / f"ray.io_v1_{plural.removesuffix('s')}.json"
    return jsonschema.Draft202012Validator(crd.closed(json.loads(path.read_text()))) if path.exists() else None


def _require_schema(plural: str, content: Object) -> None:
    validator = _validator(plural)
    wrong = next(validator.iter_errors(content), None) if validator is not None else None
    if wrong is not None:
        raise Refused(422, "Invalid", f"{wrong.json_path}: {wrong.message}", wrong.json_path)


class _Handler(QuietHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    api: ClassVar[KubeServer]

    def do_GET(self) -> None:
        self._serve(lambda who, plural, name, query, body: (200, self.api.read(plural, name, query)))

    def do_POST(self) -> None:
        self._serve(lambda who, plural, name, query, body: (201, self.api.create(who, plural, body)))

    def do_PUT(self) -> None:
        self._serve(lambda who, plural, name, query, body: (200, self.api.replace(who, plural, name, body)))

    def do_DELETE(self) -> None:
        self._serve(lambda who, plural, name, query, body: (200, self.api.remove(plural, name)))

    def do_PATCH(self) -> None:
        if self.headers["Content-Type"] != "application/json-patch+json":
            self._answer(415, {"message": f"no patch of {self.headers['Content-Type']} is known here"})
            return
        self._serve(lambda who, plural, name, query, body: (200, self.api.patch(who, plural, name, body)))

    def _serve(self, act: Callable[[str, str, str, dict[str, str], Any], tuple[int, Object]]) -> None:
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        plural, name = (*unquote(parts.path).split("/namespaces/")[1].split("/")[1:], "")[:2]
        who = self.headers["User-Agent"].removeprefix("tandem-planner/")
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        with self.api.lock:
            fault = self.api.fault(self.command, plural, who)
        if query.get("watch") in ("true", "True") and fault is None:
            self._stream(plural, query)
            return
        status, reply = (fault.status, {"message": "a fault"}) if fault is not None else (0, {})
        if fault is None or fault.is_late:
            try:
                done, content = act(who, plural, name, query, body)
            except Refused as refusal:
                done = refusal.status
                content = {"reason": refusal.reason, "message": str(refusal), "details": refusal.details}
            status, reply = (status, reply) if fault is not None else (done, content)
            self._note(Call(who, self.command, plural, name, done, body))
        else:
            self._note(Call(who, self.command, plural, name, fault.status or 999, body))
        if status:
            self._answer(status, reply, fault.headers if fault is not None else {})
        else:
            self.close_connection = True

    def _note(self, call: Call) -> None:
        with self.api.lock:
            self.api.calls.append(call)

    def _answer(self, status: int, reply: Object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(reply).encode()
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self, plural: str, query: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json;stream=watch")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for event in self.api.watch(plural, query):
                text = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True


@contextmanager
def kube_server() -> Iterator[tuple[KubeServer, str]]:
    """Run a server; yield it with its URL."""
    api = KubeServer()
    with serving(type("Handler", (_Handler,), {"api": api})) as server:
        server.daemon_threads = True
        yield api, f"http://127.0.0.1:{server.server_port}"
        api.is_closing = True
