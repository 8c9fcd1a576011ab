"""Tensor parallelism: which part of a model each rank holds, and the collectives between ranks.

Read `shard` first: it computes a rank's part of matrices, heads and vocabulary. `communicator` defines the collectives
of a step, `torch_group` implements them with torch.distributed, and through `shared_store` the ranks exchange the
addresses at which they connect."""
