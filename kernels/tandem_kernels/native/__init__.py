"""Compiled CPU kernels and the decoder built from them: C++ sources, their build and their Python face."""
