"""Rewrite a GGUF file with every tensor in float32.

    python dequantise.py SOURCE.gguf TARGET.gguf

Runs in a peer's environment, so it imports nothing of Tandem. The values are those that Tandem's own import of the same
file has: both come from the dequantisation of the package `gguf`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

_ALL_F32 = 0
"""The value of `general.file_type` for such a file."""


def dequantise(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is GGUFValueType.ARRAY else None
        value = _ALL_F32 if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, kind, sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype("float32", copy=False)
        # `shape` has the fastest axis first; what is written has it last.
        shape = tuple(int(length) for length in reversed(tensor.shape))
        writer.add_tensor(tensor.name, values.reshape(shape), raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    partial = Path(sys.argv[2]).with_suffix(".partial")
    dequantise(Path(sys.argv[1]), partial)
    partial.rename(sys.argv[2])
