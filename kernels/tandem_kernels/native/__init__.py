"""Compiled CPU kernels and a decoder built from them: C++ sources, their build, and Python bindings."""
