"""Call a Kubernetes API server through its Python client, without retries.

This is the only module that imports the client, which the extra `kubernetes` installs. The planner imports this module
only if it scales a RayCluster.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tandem.core.clock import wall_ns
from tandem.planner.kube_error import KubeError
from tandem.planner.leader_election import LeaseView
from tandem.planner.pod_watch import Pod, PodEvent

GROUP, VERSION = "ray.io", "v1"
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class KubeApi:
    """Client for the objects of one Kubernetes namespace: RayClusters, RayServices, pods and Leases.

    Methods may be called on any thread, block for at most about twice `timeout_s`, and raise KubeError. There are no
    retries. `client_name` is part of the user agent, which appears in the server's audit log."""

    def __init__(self, settings: client.Configuration, namespace: str, client_name: str, timeout_s: float) -> None:
        self.namespace = namespace
        self._timeout = (timeout_s, timeout_s)
        # No retries here: the caller decides whether to try again, and how long it may wait.
        settings.retries = False
        self._client = client.ApiClient(settings)
        self._client.user_agent = f"tandem-planner/{client_name}"
        self._custom = client.CustomObjectsApi(self._client)
        self._core = client.CoreV1Api(self._client)
        self._coordination = client.CoordinationV1Api(self._client)

    def close(self) -> None:
        self._client.close()  # type: ignore[no-untyped-call]

    # ---- Ray's objects

    def read_cluster(self, name: str) -> dict[str, Any]:
        return self._custom_object("rayclusters", name)

    def read_service(self, name: str) -> dict[str, Any]:
        return self._custom_object("rayservices", name)

    def patch_cluster(self, name: str, operations: Sequence[Mapping[str, Any]]) -> None:
        """Apply a JSON Patch (RFC 6902) to the RayCluster `name`.

        If `operations` replace `metadata.resourceVersion`, the patch applies only to that version of the object. If the
        object has another version by now, KubeError is raised with `is_conflict`."""
        self._call(
            self._custom.patch_namespaced_custom_object,
            *(GROUP, VERSION, self.namespace, "rayclusters", name, list(operations)),
            field_manager="tandem-planner",
            _content_type="application/json-patch+json",
        )

    def _custom_object(self, plural: str, name: str) -> dict[str, Any]:
        return self._call(self._custom.get_namespaced_custom_object, GROUP, VERSION, self.namespace, plural, name)

    # ---- pods

    def list_pods(self, selector: str) -> tuple[list[Pod], str]:
        """Return the pods that match the label selector `selector`, and the resource version for `watch_pods`."""
        pod_list = self._call(self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        return [_pod(item) for item in pod_list.get("items", ())], str(pod_list["metadata"]["resourceVersion"])

    def watch_pods(self, selector: str, version: str, window_s: int) -> PodStream:
        """Open a stream of the changes of pods after resource version `version`.

        `selector`: label selector of the pods. The server ends the stream after about `window_s` seconds."""
        response = self._raw(
            self._core.list_namespaced_pod,
            self.namespace,
            label_selector=selector,
            resource_version=version,
            watch=True,
            allow_watch_bookmarks=True,
            timeout_seconds=window_s,
            _request_timeout=(self._timeout[0], window_s + self._timeout[1]),
        )
        return PodStream(response)

    # ---- the Lease

    def read_lease(self, name: str) -> LeaseView | None:
        """Return the Lease `name`; None if it does not exist."""
        try:
            return _lease_view(self._call(self._coordination.read_namespaced_lease, name, self.namespace))
        except KubeError as error:
            if error.status == 404:
                return None
            raise

    def create_lease(self, name: str, holder: str, lease_s: float, owner: Mapping[str, Any] | None = None) -> LeaseView:
        """Create the Lease `name` and return it as stored. `owner`: reference to the object whose deletion makes
        the server delete the Lease."""
        body = _lease(name, LeaseView(holder=holder, lease_s=lease_s, owners=() if owner is None else (owner,)))
        return _lease_view(self._call(self._coordination.create_namespaced_lease, self.namespace, body))

    def replace_lease(self, name: str, lease: LeaseView) -> LeaseView:
        """Write `lease` over the Lease `name` and return it as stored.

        Raises KubeError with `is_conflict` if the stored Lease has changed since `lease.version`."""
        body = _lease(name, lease)
        return _lease_view(self._call(self._coordination.replace_namespaced_lease, name, self.namespace, body))

    # ---- internals

    def _call(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> dict[str, Any]:
        response = self._raw(call, *arguments, _request_timeout=self._timeout, **options)
        try:
            reply = json.loads(response.data)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise KubeError(0, f"{type(error).__name__}: {error}") from error
        if not isinstance(reply, dict):
            raise KubeError(0, f"an answer that is no object: {reply!r}")
        return reply

    def _raw(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, _preload_content=False, **options)
        except ApiException as error:
            raise _kube_error(error) from error
        except (urllib3.exceptions.HTTPError, OSError, config.ConfigException) as error:
            # ConfigException: the service account token, which is read anew at each call, is missing.
            raise KubeError(0, f"{type(error).__name__}: {error}") from error


class PodStream:
    """An open watch: iterating yields the changes of pods until the server ends the watch.

    Iterating blocks between changes, and raises KubeError when the connection breaks."""

    def __init__(self, response: Any) -> None:
        self._response = response

    def __iter__(self) -> Iterator[PodEvent]:
        buffer = b""
        try:
            for part in self._response.stream(amt=None, decode_content=True):
                *lines, buffer = (buffer + part).split(b"\n")
                yield from (_event(json.loads(line)) for line in lines if line.strip())
        except (urllib3.exceptions.HTTPError, OSError, ValueError, KeyError, AttributeError) as error:
            raise KubeError(0, f"the watch broke: {type(error).__name__}: {error}") from error
        finally:
            self._response.close()

    def cut(self) -> None:
        """Close the connection, so that an iteration on another thread ends."""
        connection = getattr(self._response, "connection", None)
        sock = getattr(connection, "sock", None)
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def connect(namespace: str, client_name: str, timeout_s: float) -> KubeApi:
    """Build a KubeApi from this machine's kubeconfig or this pod's service account.

    The connection is made by the first call of a method of the result. `namespace`: empty for the pod's own namespace,
    or "default" outside a pod. `client_name`: see `KubeApi`. `timeout_s`: limit in seconds for connecting and for each
    read. Raises KubeError if there is neither a kubeconfig nor a service account."""
    settings = client.Configuration()
    # Not `load_config`, which prints a sentence in a pod, where each line of the log must be JSON.
    try:
        config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException as no_file:
        try:
            config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException as no_pod:
            raise KubeError(0, f"neither a kubeconfig ({no_file}) nor a service account ({no_pod})") from no_pod
    return KubeApi(settings, namespace or _own_namespace(), client_name, timeout_s)


def _own_namespace() -> str:
    try:
        return _OWN_NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"


def _kube_error(error: Any) -> KubeError:
    headers = error.headers or {}
    after = str(headers.get("Retry-After", ""))
    try:
        reply = json.loads(error.body)
        message, causes = str(reply["message"]), (reply.get("details") or {}).get("causes")
    except (TypeError, ValueError, KeyError, AttributeError):
        message, causes = str(error.reason), None
    is_invalid = error.status == HTTPStatus.UNPROCESSABLE_ENTITY and bool(causes)
    retry_after_s = float(after) if after.isdigit() else None
    return KubeError(int(error.status or 0), message, retry_after_s, is_invalid=is_invalid)


def _event(event: dict[str, Any]) -> PodEvent:
    kind, item = str(event["type"]), event["object"]
    if kind == "ERROR":
        raise KubeError(int(item.get("code", 0)), str(item.get("message", "")))
    version = str(item["metadata"]["resourceVersion"])
    return PodEvent(kind, None if kind == "BOOKMARK" else _pod(item), version)


def _pod(item: dict[str, Any]) -> Pod:
    metadata, status = item["metadata"], item.get("status", {})
    return Pod(
        name=str(metadata["name"]),
        group=str(metadata.get("labels", {}).get("ray.io/group", "")),
        ip=str(status.get("podIP", "")),
        is_ending="deletionTimestamp" in metadata or status.get("phase") in ("Succeeded", "Failed"),
    )


def _lease_view(lease: dict[str, Any]) -> LeaseView:
    spec = lease.get("spec", {})
    return LeaseView(
        holder=str(spec.get("holderIdentity") or ""),
        lease_s=float(spec.get("leaseDurationSeconds") or 0),
        renewed=str(spec.get("renewTime") or ""),
        acquired=str(spec.get("acquireTime") or ""),
        num_changes=int(spec.get("leaseTransitions") or 0),
        owners=tuple(lease["metadata"].get("ownerReferences") or ()),
        version=str(lease["metadata"]["resourceVersion"]),
    )


def _lease(name: str, lease: LeaseView) -> dict[str, Any]:
    """Build the Lease object. Its times are for people only: no planner compares them with its clock."""
    now = datetime.fromtimestamp(wall_ns() / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {
            "name": name,
            **({"ownerReferences": list(lease.owners)} if lease.owners else {}),
            **({"resourceVersion": lease.version} if lease.version else {}),
        },
        "spec": {
            "holderIdentity": lease.holder,
            "leaseDurationSeconds": max(1, round(lease.lease_s)),
            "acquireTime": lease.acquired or now,
            "renewTime": now,
            "leaseTransitions": lease.num_changes,
        },
    }
