"""Compile CPU kernels and a decoder built from them: C++ sources, their build, and Python bindings.

`decoder.CompiledDecoder` runs a whole model on weights that `pack` and `pack_codes` have packed. `library`
binds single kernels, and `build` compiles the sources on first use. Read `decoder` first, then `library`.
"""
