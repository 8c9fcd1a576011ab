"""What is rendered is valid for every version of Kubernetes, for KubeRay, the Prometheus operator and Ray Serve; only a
cluster can tell whether it works."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from kubernetes_validate import utils as kubernetes

from tests.chart import crd
from tests.chart.release import CHART, CI, NAMESPACE, Object, Rendered, ci, containers, env, helm, pods, render
from tests.chart.serve_schema import ServeDeploySchema

EACH = pytest.mark.parametrize("name", CI)
VERSIONS = sorted({v for v in kubernetes.all_versions() if tuple(map(int, v.split(".")[:2])) >= (1, 30)})
CRDS = {"RayService", "ServiceMonitor", "PodMonitor", "PrometheusRule"}
NO_SCHEMA = {"HTTPRoute", "GRPCRoute"}
"""Of the Gateway API; their tests are in test_gateway.py."""


@pytest.fixture(autouse=True)
def _schemas_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "schema_contents", _contents)


_contents = functools.cache(kubernetes.schema_contents)


@functools.cache
def distinct() -> tuple[Object, ...]:
    """Objects of all files, those that are alike once; and the Ray pods, as pods."""
    found: dict[str, Object] = {}
    for name in CI:
        for one in [*ci(name).objects, *ray_pods(ci(name))]:
            found.setdefault(json.dumps(one, sort_keys=True), one)
    return tuple(found.values())


def ray_pods(rendered: Rendered) -> list[Object]:
    return [
        {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(template)}
        for where, template in pods(rendered.objects)
        if where.startswith("RayService")
    ]


@EACH
def test_helm_finds_nothing_to_complain_about(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), "-f", str(CI[name]))
    assert done.returncode == 0, done.stdout + done.stderr


def test_versions_go_from_the_chart_s_oldest_to_the_newest_known() -> None:
    oldest = re.search(r'kubeVersion: ">=(\d+\.\d+)\.', (CHART / "Chart.yaml").read_text())
    assert oldest and VERSIONS[0].startswith(oldest[1]) and len(VERSIONS) >= 8


@pytest.mark.parametrize(
    "version", [VERSIONS[0], *(pytest.param(one, marks=pytest.mark.nightly) for one in VERSIONS[1:-1]), VERSIONS[-1]]
)
def test_every_object_is_one_of_kubernetes(version: str) -> None:
    known = [one for one in distinct() if one["kind"] not in CRDS | NO_SCHEMA]
    assert len(known) > 50
    for one in known:
        try:
            kubernetes.validate(one, version, strict=True)
        except (kubernetes.ValidationError, kubernetes.SchemaNotFoundError) as error:
            pytest.fail(f"{one['kind']} {one['metadata'].get('name')}: {error.message}")


def test_that_check_finds_a_key_that_is_nowhere_in_kubernetes() -> None:
    deployment = copy.deepcopy(ci("cpu-trial").one("gateway-deployment"))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["pth"] = "/"
    with pytest.raises(kubernetes.ValidationError, match="pth"):
        kubernetes.validate(deployment, VERSIONS[-1], strict=True)


@EACH
def test_custom_resources_are_as_their_operators_define_them(name: str) -> None:
    custom = [one for one in ci(name).objects if one["kind"] in CRDS]
    assert custom and not [violation for one in custom for violation in crd.violations(one)]


def test_that_check_finds_misspelt_keys_and_wrong_types() -> None:
    broken = copy.deepcopy(ci("cpu-trial").one("rayservice"))
    group = broken["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["replica"], group["maxReplicas"] = 1, "two"
    found = crd.violations(broken)
    assert len(found) == 2 and any("'replica'" in one for one in found) and any("'two'" in one for one in found)


@EACH
def test_serve_takes_its_document(name: str) -> None:
    document = ServeDeploySchema.model_validate(ci(name).serve)
    assert len(document.applications) == len(ci(name).applications)
    assert document.proxy_location == "EveryNode" and document.http_options.port == 8000
    assert len({one.route_prefix for one in document.applications}) == len(document.applications)


@EACH
def test_images_are_pinned(name: str) -> None:
    images = [c["image"] for _, pod in pods(ci(name).objects) for c in containers(pod)]
    assert images
    for image in images:
        tag = image.rpartition(":")[2]
        assert "@sha256:" in image or re.fullmatch(r"v?\d+\.\d+\.\d+[\w.-]*", tag), image


@EACH
def test_nobody_is_root_and_nothing_is_writable_or_more_than_it_must(name: str) -> None:
    for where, pod in pods(ci(name).objects):
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0 and security["fsGroup"] > 0, where
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, where
        for container in containers(pod):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and own["runAsNonRoot"] and "runAsUser" not in own, where
            assert own["allowPrivilegeEscalation"] is False and "privileged" not in own, where
            assert own["capabilities"] == {"drop": ["ALL"]}, f"{where}: who is not root loses what is added"


@EACH
def test_pods_fit_the_restricted_standard_unless_a_pool_is_on_the_host_network(name: str) -> None:
    """The rest of Pod Security's `restricted` (https://kubernetes.io/docs/concepts/security/pod-security-standards/)."""
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    for where, pod in pods(ci(name).objects):
        spec = pod["spec"]
        is_on_the_host = spec.get("hostNetwork", False)
        assert not is_on_the_host or (where.startswith("RayService/") and not where.endswith("/head")), where
        assert not spec.get("hostPID") and not spec.get("hostIPC"), where
        for volume in spec.get("volumes", ()):
            assert volume.keys() - {"name"} <= allowed, f"{where}: {volume['name']}"
        for container in containers(pod):
            ports = [port for port in container.get("ports", ()) if "hostPort" in port]
            assert is_on_the_host or not ports, where


@EACH
def test_limits_are_everywhere(name: str) -> None:
    container_resources = [
        (where, one["resources"]) for where, pod in pods(ci(name).objects) for one in containers(pod)
    ]
    ray = ci(name).ray["rayClusterConfig"]
    if ray["enableInTreeAutoscaling"]:
        container_resources.append(("autoscaler", ray["autoscalerOptions"]["resources"]))
    for where, resources in container_resources:
        assert {"cpu", "memory"} <= resources["limits"].keys() and {"cpu", "memory"} <= resources["requests"].keys(), (
            where
        )
    for where, pod in pods(ci(name).objects):
        for volume in pod["spec"].get("volumes", ()):
            assert "sizeLimit" in volume.get("emptyDir", {"sizeLimit": ""}), f"{where}: {volume['name']}"


@EACH
def test_only_who_speaks_with_the_api_has_a_token(name: str) -> None:
    scales = ci(name).ray["rayClusterConfig"]["enableInTreeAutoscaling"]
    for where, pod in pods(ci(name).objects):
        patches = ci(name).config["planner"]["actuator"] == "raycluster"
        speaks = patches if where.endswith("-planner") else where.endswith("/head") and scales
        speaks = speaks or where.endswith("-uninstall")
        assert pod["spec"]["automountServiceAccountToken"] is speaks, where
    assert all(one["automountServiceAccountToken"] is False for one in ci(name).kinds("ServiceAccount"))


@EACH
def test_selectors_find_what_they_are_for(name: str) -> None:
    labels = {where: pod["metadata"]["labels"] for where, pod in pods(ci(name).objects)}
    for one in ci(name).objects:
        match one["kind"]:
            case "Deployment":
                assert finds(one["spec"]["selector"], one["spec"]["template"]["metadata"]["labels"])
            case "PodDisruptionBudget":
                assert [finds(one["spec"]["selector"], each) for each in labels.values()].count(True) == 1
            case "Service":
                selector = {"matchLabels": one["spec"]["selector"]}
                assert [finds(selector, each) for each in labels.values()].count(True) == 1
            case "NetworkPolicy":
                selector = {k: v for k, v in one["spec"]["podSelector"]["matchLabels"].items() if "ray.io" not in k}
                if selector["app.kubernetes.io/component"] != "test":
                    assert any(finds({"matchLabels": selector}, each) for each in labels.values()), one["metadata"][
                        "name"
                    ]


def finds(selector: Object, labels: dict[str, str]) -> bool:
    return selector["matchLabels"].items() <= labels.items()


@EACH
def test_services_lead_to_ports_that_somebody_listens_at(name: str) -> None:
    for service in ci(name).kinds("Service"):
        listening = {
            port["name"]
            for _, pod in pods(ci(name).objects)
            if finds({"matchLabels": service["spec"]["selector"]}, pod["metadata"]["labels"])
            for container in containers(pod)
            for port in container.get("ports", ())
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= listening


@EACH
def test_what_is_mounted_is_there_and_nothing_is_mounted_as_a_single_file(name: str) -> None:
    for where, pod in pods(ci(name).objects):
        volumes = {one["name"] for one in pod["spec"].get("volumes", ())}
        mounted = [mount for container in containers(pod) for mount in container.get("volumeMounts", ())]
        assert {one["name"] for one in mounted} == volumes, where
        assert not any("subPath" in one for one in mounted), f"{where}: such a file never changes"


@EACH
def test_names_and_labels_are_kubernetes(name: str) -> None:
    check_names(ci(name))
    assert {one["metadata"]["namespace"] for one in ci(name).objects} == {NAMESPACE}


@pytest.mark.parametrize("name", ["everything-on", "everything-off", "rdma"])
def test_a_long_name_of_a_release_is_cut(name: str) -> None:
    release = "a-release-whose-name-is-as-long-as-helm-takes-or-1-le"
    assert len(release) == 53
    rendered = ci(name, release)
    check_names(rendered)
    # KubeRay takes no longer ones, because it adds to them.
    assert len(rendered.one("rayservice")["metadata"]["name"]) <= 47


def test_names_that_look_like_other_types_stay_text() -> None:
    """YAML reads `123`, `1e3`, `yes` and `true` as numbers and booleans, which the API refuses for names."""
    secret = {"existingSecret": "123"}
    values = {
        "fullnameOverride": "serving",
        "image": {"pullSecrets": ["123"]},
        "gateway": {
            "priorityClassName": "123",
            "env": {"NO": "a"},
            "ingress": {"enabled": True, "className": "123"},
            "tls": {**secret, "caKey": "1", "clientCaSecret": "1e3", "clientCaKey": "1"},
        },
        "tenants": {**secret, "key": "1"},
        "cluster": {**secret, "tls": secret},
        "redis": {
            "mode": "external",
            "external": {"addresses": ["a:1"], **secret, "passwordKey": "1", "tls": {"caSecret": "123", "caKey": "1"}},
        },
        "poolDefaults": {"runtimeClassName": "123", "priorityClassName": "true"},
        "pools": {"yes": {"role": "mixed"}},
        "cache": {"type": "pvc", "storageClassName": "123", "hubToken": {**secret, "key": "1"}},
        "serviceAccount": {"gateway": "123", "worker": "true", "planner": "1e3"},
        "monitoring": {"podMonitor": {"enabled": True}},
        "planner": {"enabled": True, "actuator": "raycluster"},
        "ray": {"inTreeAutoscaling": {"enabled": False}},
    }
    done = helm("template", "123", str(CHART), "--namespace", "456", "-f", "-", values=json.dumps(values))
    assert done.returncode == 0, done.stderr
    found = [pair for one in yaml.load_all(done.stdout, yaml.CSafeLoader) for pair in scalars(one)]
    assert len(found) > 1000 and [pair for pair in found if pair[0] in TEXTS and not isinstance(pair[1], str)] == []


TEXTS = {"name", "namespace", "key", "secretName", "claimName", "groupName", "regex", "app.kubernetes.io/instance"}
TEXTS |= {f"{kind}Name" for kind in ("serviceAccount", "priorityClass", "runtimeClass", "storageClass", "ingressClass")}


def scalars(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each number, text or boolean in `value` with the key that it belongs to."""
    if isinstance(value, dict):
        for own, part in value.items():
            yield from scalars(part, own)
    elif isinstance(value, list):
        for part in value:
            yield from scalars(part, key)
    else:
        yield key, value


def check_names(rendered: Rendered) -> None:
    seen = set[tuple[str, str]]()
    for one in rendered.objects:
        name = one["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
        assert (one["kind"], name) not in seen, f"{one['kind']} {name} is there twice"
        seen.add((one["kind"], name))
        for value in one["metadata"]["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?)?", value), value
    for where, pod in pods(rendered.objects):
        ports = [port["name"] for container in containers(pod) for port in container.get("ports", ())]
        assert len(set(ports)) == len(ports) and all(len(port) <= 15 for port in ports), where


@EACH
def test_no_secret_is_in_plain_sight(name: str) -> None:
    rendered = ci(name)
    secret = {value for one in rendered.kinds("Secret") for value in one["stringData"].values()}
    secret = {value for value in secret if len(value) < 200}
    elsewhere = json.dumps([one for one in rendered.objects if one["kind"] != "Secret"])
    assert not any(value in elsewhere for value in secret)
    for _, pod in pods(rendered.objects):
        for container in containers(pod):
            for variable, value in env(container).items():
                if re.search("PASSWORD|TOKEN|SECRET$|AUTH$", variable):
                    assert "secretKeyRef" in value, variable


def test_every_template_is_rendered_by_a_file() -> None:
    templates = {path.stem for path in (CHART / "templates").glob("*.yaml")}
    rendered: set[Any] = {template for name in CI for template in ci(name).by_template}
    assert templates <= rendered
    assert all(len(made) == 1 for name in CI for made in ci(name).by_template.values()), "one object a file"


def test_labels_of_all_are_on_all() -> None:
    rendered = render({"commonLabels": {"team": "inference"}})
    assert all(one["metadata"]["labels"]["team"] == "inference" for one in rendered.objects)
    assert all(pod["metadata"]["labels"]["team"] == "inference" for _, pod in pods(rendered.objects))
