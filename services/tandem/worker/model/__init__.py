"""Load what a worker serves (model, KV memory, transport), and define what it reports of itself.

`worker_model.load_worker_model` loads the model and allocates the KV memory; `rank_model` does the same over several
ranks. `rank_transfer` opens the transports and the KV transfer of the ranks. `worker_info` has the worker's identity
and its answer to the rpc Describe. Read `worker_model` first.
"""
