"""Make .venv what `.ci/setup serve` or `.ci/setup all` asks for; do nothing when it already is.

Runs before any package is installed, so it imports the standard library only. What pip and the compiler print goes to
`.venv/setup.log`; the terminal gets one line for each step, as from `tandem serve`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(".venv")
LOG = VENV / "setup.log"
PYTHON = VENV / "bin" / "python"
SERVE_EXTRAS = ("gateway", "worker")
FURTHER_EXTRAS = ("sim", "loadtest", "kubernetes", "dev")
NAMES = ("serve", "all")
"""What can be set up: what serving needs, and everything."""

FIRST_IMPORT = (
    "import torch, grpc, ray.serve, tandem.cli.serve, tandem.cli.local_ray, tandem.gateway.main, "
    "tandem.worker.worker, tandem.worker.model.worker_model, tandem.runtime.gguf"
)
"""What the processes of `tandem serve` import. Several of them would otherwise compile the same files at once."""
BUILD_KERNELS = "kernels/tandem_kernels/native/build.py"
LOG_LINES = 8
_FOUND = re.compile(r"(?:Collecting|Processing) (?:\S*/)?([\w.-]+?)(?:-\d|[^\w.-]|$)")

HINTS = {
    r"No space left on device|Disk quota exceeded": """\
The disk is full: {free_mb} MB are free here. Serving needs 2 GB with torch for CPUs and 8 GB with torch for CUDA, the
tests 2 GB more, and the model 1.2 GB in the user's cache.""",
    r"ensurepip is not|No module named '?(venv|ensurepip|pip)": """\
This Python cannot make virtual environments. Debian, Ubuntu: apt-get install python3-venv""",
    r"[Tt]emporary failure in name resolution|Name or service not known|[Cc]onnection refused|Network is unreachable|"
    r"NewConnectionError|ProxyError|[Tt]imed out|dns error|error sending request": """\
The package index does not answer. Check the network. Behind a proxy set https_proxy; a mirror is named by
PIP_INDEX_URL, or by UV_DEFAULT_INDEX where uv is installed.""",
    r"No matching distribution|No solution found|ResolutionImpossible": """\
The package index does not have the tested versions for {python} on {machine}. Tested is Python 3.11 on Linux,
which PYTHON=/path/to/python3.11 names. If the index is a mirror or cannot be reached, PIP_INDEX_URL names another.""",
    r"Permission denied|Read-only file system": """\
Files cannot be written here. Check who owns .venv and the user's cache.""",
}
"""What to do about a failure, by what its output matches; the first match counts."""


class Clock:
    now = staticmethod(time.monotonic)


class Failed(Exception):
    """A step failed; the message names the step and its command's exit code."""


class Job:
    """A command that runs in the background, with its output in a file of its own until it has ended."""

    def __init__(self, name: str, command: Sequence[str | Path]) -> None:
        self.name = name
        self.output = VENV / f"setup-{name}.log"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        with self.output.open("wb") as file:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def text(self) -> str:
        """Return the output so far; an empty string once it was moved, of which another thread may not know yet."""
        try:
            return self.output.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def wait(self) -> int:
        """Wait for the end, move the output to the log, and return the exit code."""
        code = self._process.wait()
        with LOG.open("a") as log:
            log.write(f"$ {' '.join(map(str, self._process.args))}\n{self.text()}\n")
        self.output.unlink()
        return code

    def is_running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self.output.unlink(missing_ok=True)


class SetUp:
    """Make the environment in the current folder. `lines`: the ProgressLines that show each step."""

    def __init__(self, name: str, lines: object) -> None:
        self.name = name
        self._lines = lines
        self._jobs: list[Job] = []

    def run(self) -> None:
        has_python = works()
        if not has_python and VENV.exists():
            shutil.rmtree(VENV)
        VENV.mkdir(exist_ok=True)
        LOG.write_text("")
        kernels = self._start("kernels", [sys.executable, "-B", BUILD_KERNELS])
        if not has_python:
            self._lines.step("python", f"making {VENV} with Python {platform.python_version()} ({sys.executable})")
            self._finish(self._start("python", [sys.executable, "-m", "venv", VENV]))
        if not is_set_up("serve"):
            self._install_serve()
        if self.name == "all":
            self._install_rest()
        self._await_kernels(kernels)
        self._lines.step("set-up", f"done; what pip and the compiler said is in {LOG}")

    def stop(self) -> None:
        for job in self._jobs:
            job.stop()

    def _install_serve(self) -> None:
        for stamp in map(stamp_of, NAMES):
            stamp.unlink(missing_ok=True)
        constraints = VENV / "constraints.txt"
        # Torch for CUDA asks for the very Triton that it was built with; another torch leaves it to the tested one.
        constraints.write_text(re.sub(r"(?m)^triton==.*\n", "", Path("constraints.txt").read_text()))
        # Serving imports few of the files; the first import compiles these.
        not_compiled = [] if shutil.which("uv") else ["--no-compile"]
        index = os.environ.get("TANDEM_TORCH_INDEX")
        if index:
            torch = next(text for text in requirements(["worker"]) if text.startswith("torch=="))
            self._install(
                "torch", f"fetching {torch} from {index}", *not_compiled, "-c", constraints, "--index-url", index, torch
            )
        elif (platform.system(), platform.machine()) == ("Linux", "x86_64") and not shutil.which("nvidia-smi"):
            text = (
                "no NVIDIA driver here; if torch comes with CUDA, TANDEM_TORCH_INDEX=<index of CPU wheels> saves 6 GB"
            )
            self._lines.step("torch", text)
        project = f".[{','.join(SERVE_EXTRAS)}]"
        self._install(
            "packages", "fetching and installing what serving needs", *not_compiled, "-c", constraints, "-e", project
        )
        self._lines.step("import", "importing it once, so that later starts find it compiled")
        self._finish(self._start("import", [PYTHON, "-W", "ignore", "-c", FIRST_IMPORT]))
        stamp_of("serve").write_text(digest())

    def _install_rest(self) -> None:
        constraints = VENV / "constraints.txt"
        pins = Path("constraints.txt").read_text()
        brings = [PYTHON, "-c", "import importlib.metadata as m; print(*m.requires('torch'))"]
        if "triton" in subprocess.run(brings, capture_output=True, text=True, check=True).stdout:
            pins = re.sub(r"(?m)^triton==.*\n", "", pins)
        constraints.write_text(pins)
        what = "fetching and installing the tools of tests and load tests"
        self._install("tools", what, "-c", constraints, *requirements(FURTHER_EXTRAS))
        stamp_of("all").write_text(digest())

    def _install(self, stage: str, what: str, *arguments: str | Path) -> None:
        uv = shutil.which("uv")
        if uv:
            command = [uv, "pip", "install", "--python", PYTHON, *find_links()]
        else:
            command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check"]
            command += ["--progress-bar", "off"]
        job = self._start(stage, [*command, *arguments])
        self._lines.step(stage, what, lambda: installing(job.text(), num_installed()))
        self._finish(job)

    def _await_kernels(self, job: Job) -> None:
        if job.is_running():
            self._lines.step("kernels", "compiling the C++ kernels for this processor")
        if job.wait():
            what = "not compiled, so that serving is slower; with a C++ compiler the next start compiles them: "
            self._lines.step("kernels", what + last(LOG, 1))

    def _start(self, name: str, command: Sequence[str | Path]) -> Job:
        self._jobs.append(Job(name, command))
        return self._jobs[-1]

    def _finish(self, job: Job) -> None:
        code = job.wait()
        if code:
            raise Failed(f"{job.name}: the command ended with code {code}")


def works() -> bool:
    """Return whether .venv has an interpreter that runs, with pip."""
    command = [PYTHON, "-c", "import pip"]
    return PYTHON.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def stamp_of(name: str) -> Path:
    """Return the file that says for which `digest()` the environment was set up."""
    return VENV / f".tandem-{name}"


def is_set_up(name: str) -> bool:
    """Return whether .venv was set up for the present content of the files that `digest` reads."""
    try:
        return stamp_of(name).read_text() == digest()
    except OSError:
        return False


def digest() -> str:
    """Return a digest of what the environment depends on: requirements, interpreter, source of torch, this folder."""
    document = tomllib.loads(Path("pyproject.toml").read_text())
    parts = [document["build-system"], document["project"], document["tool"]["setuptools"]]
    parts += [sys.version_info[:3], os.environ.get("TANDEM_TORCH_INDEX", ""), os.getcwd()]
    files = [Path(name).read_bytes() for name in ("constraints.txt", ".ci/set_up.py")]
    return hashlib.sha256(b"\0".join([repr(parts).encode(), *files])).hexdigest()


def requirements(extras: Sequence[str]) -> list[str]:
    """Return the requirements of some extras of pyproject.toml."""
    optional = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    return list(dict.fromkeys(text for extra in extras for text in optional[extra]))


def find_links() -> Iterator[str]:
    """Yield uv's arguments for the folders in which pip looks for packages, which uv does not read from pip's files."""
    configured = subprocess.run(
        [PYTHON, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    ).stdout
    for place in sorted({*os.environ.get("PIP_FIND_LINKS", "").split(), *configured.split()}):
        yield from ("--find-links", place)


def num_installed() -> int:
    return len(list(VENV.glob("lib/python3*/site-packages/*.dist-info")))


def installing(output: str, num_present: int) -> str:
    """Describe what pip is doing by what it has printed. `num_present`: packages in the environment."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and " is ignored: " not in line]
    found = [match[1] for match in map(_FOUND.match, lines) if match]
    chosen = [line for line in lines if line.startswith("Installing collected packages: ")]
    if chosen:
        return f"installing {chosen[-1].count(',') + 1} packages; {num_present} are there"
    sizes = re.findall(r"(?m)^ *Downloading \S+ \(([\d.]+) ([kM])B\)", output)
    num_mb = sum(float(size) / (1 if unit == "M" else 1000) for size, unit in sizes)
    if not found:
        return lines[-1][:100] if lines else ""
    fetched = f", {num_mb:.0f} MB downloaded" if num_mb >= 1 else ""
    return f"found {len(found)} packages{fetched}; now {found[-1]}"


def last(file: Path, num_lines: int) -> str:
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-num_lines:])


def hint(output: str) -> str:
    """Return what to do about a failed command, by what it printed; an empty string if it is not known."""
    for pattern, text in HINTS.items():
        if re.search(pattern, output):
            free_mb = shutil.disk_usage(".").free >> 20
            python = f"Python {platform.python_version()}"
            return text.format(free_mb=free_mb, python=python, machine=platform.machine())
    return ""


def main(name: str) -> int:
    if is_set_up(name):
        return 0
    progress = runpy.run_path(str(ROOT / "services/tandem/cli/progress_lines.py"))["ProgressLines"]
    lines = progress(Clock(), rewrites=True)
    set_up = SetUp(name, lines)
    try:
        with lines, contextlib.ExitStack() as stack:
            stack.callback(set_up.stop)
            set_up.run()
        return 0
    except KeyboardInterrupt:
        print("\nset-up stopped; the same command goes on from here", file=sys.stderr)
        return 130
    except (Failed, OSError) as error:
        output = LOG.read_text(errors="replace") if LOG.exists() else ""
        shown = "\n".join(f"  {line}" for line in last(LOG, LOG_LINES).splitlines()) if output else ""
        advice = hint(f"{error}\n{output[-20000:]}") or "What was installed is kept; the same command tries again."
        print(f"\nset-up failed: {error}\n{shown}\n{advice}\nall of it: {LOG}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    os.chdir(ROOT)
    if sys.argv[1] not in NAMES:
        sys.exit(f"usage: .ci/setup [{'|'.join(NAMES)}]")
    sys.exit(main(sys.argv[1]))
