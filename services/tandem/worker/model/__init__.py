"""What a worker serves and says of itself: model, KV memory, transport, identity and descriptor.

Start with `worker_model`; `rank_model` and `rank_transfer` do the same over several ranks.
"""
