"""Describe the architectures of models as data: what a decoder computes, and the names of its weights in a checkpoint.

`table` lists the families by `model_type`. Each family is one file with a function that turns a config.json into a
`DecoderSpec`, and raises an error that names the first field that is in use but not implemented. docs/models.md says
how to add a family.
"""
