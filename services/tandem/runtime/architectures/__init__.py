"""Describe the architectures of models as data: what a decoder computes, and where a checkpoint has its weights.

`table` lists the families by `model_type`. Each family is one file that turns a config.json into a `DecoderSpec` and
refuses, by its name, each field that is in use and not implemented. docs/models.md says how to add one.
"""
