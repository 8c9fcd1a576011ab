"""Generates `tandem.wire.gen` from proto/; never edits what it did not write.

protoc's Python plugins name modules after the files' paths in proto/. Here they live flat in one package, so the
imports between them are rewritten. The gRPC plugin writes no types: stubs with asyncio types come from the descriptors.
`--check` writes nothing and exits 1 when the committed files are not what would be written.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import grpc_tools
from committed import keep
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "proto"
TARGET = ROOT / "services" / "tandem" / "wire" / "gen"
PACKAGE = "tandem.wire.gen"
INIT = '"""What protoc made of proto/; regenerate with `make proto`, never edit."""\n'


def main() -> int:
    return keep("Generate the protobuf and gRPC modules.", TARGET, "*.py*", generate, "make proto")


def generate() -> dict[str, str]:
    """File name -> content of everything that belongs into the package."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        descriptors = run_protoc(out)
        files = {path.name: flatten_imports(path.read_text()) for path in out.rglob("*.py*")}
    for file in descriptors.file:
        stem = Path(file.name).stem
        if file.service:
            files[f"{stem}_pb2_grpc.pyi"] = service_stub(file)
        else:
            del files[f"{stem}_pb2_grpc.py"]
    return {"__init__.py": INIT, **files}


def run_protoc(out: Path) -> FileDescriptorSet:
    descriptor_file = out / "descriptors.bin"
    protos = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    command = ["protoc", f"-I{SOURCE}", f"-I{well_known}", f"--descriptor_set_out={descriptor_file}"]
    command += [f"--{plugin}_out={out}" for plugin in ("python", "pyi", "grpc_python")]
    if protoc.main([*command, *protos]) != 0:
        raise SystemExit("protoc refused the files in proto/")
    return FileDescriptorSet.FromString(descriptor_file.read_bytes())


def flatten_imports(text: str) -> str:
    return re.sub(r"^from tandem(?:\.\w+)+ import (\w+_pb2)\b", rf"from {PACKAGE} import \1", text, flags=re.MULTILINE)


def service_stub(file: FileDescriptorProto) -> str:
    """Types of a `*_pb2_grpc` module as `grpc.aio` calls and serves it."""
    messages = f"{Path(file.name).stem}_pb2"
    lines = ["from collections.abc import AsyncIterator", "", "import grpc.aio", ""]
    lines += [f"from {PACKAGE} import {messages}"]
    for service in file.service:
        lines += ["", f"class {service.name}Stub:", "    def __init__(self, channel: grpc.aio.Channel) -> None: ..."]
        lines += [f"    {method.name}: {call_type(method, messages)}" for method in service.method]
        lines += ["", f"class {service.name}Servicer:"]
        lines += [handler(method, messages) for method in service.method]
        signature = f"servicer: {service.name}Servicer, server: grpc.aio.Server"
        lines += ["", f"def add_{service.name}Servicer_to_server({signature}) -> None: ..."]
    return "\n".join(lines) + "\n"


def call_type(method: MethodDescriptorProto, messages: str) -> str:
    kinds = {True: "Stream", False: "Unary"}
    name = f"{kinds[method.client_streaming]}{kinds[method.server_streaming]}MultiCallable"
    return f"grpc.aio.{name}[{type_of(method.input_type, messages)}, {type_of(method.output_type, messages)}]"


def handler(method: MethodDescriptorProto, messages: str) -> str:
    request, reply = type_of(method.input_type, messages), type_of(method.output_type, messages)
    context = f"grpc.aio.ServicerContext[{request}, {reply}]"
    taken = f"request_iterator: AsyncIterator[{request}]" if method.client_streaming else f"request: {request}"
    # A streaming handler is an asynchronous generator function: calling it gives the iterator, not a coroutine.
    keyword, given = ("def", f"AsyncIterator[{reply}]") if method.server_streaming else ("async def", reply)
    return f"    {keyword} {method.name}(self, {taken}, context: {context}) -> {given}: ..."


def type_of(proto_name: str, messages: str) -> str:
    return f"{messages}.{proto_name.rpartition('.')[2]}"


if __name__ == "__main__":
    sys.exit(main())
