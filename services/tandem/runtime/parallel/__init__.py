"""Tensor parallelism: how a model is split over ranks, and the collectives between them."""
