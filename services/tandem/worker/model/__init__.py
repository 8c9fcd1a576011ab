"""Load what a worker serves (model, KV memory, transport), and define what it reports of itself.

`worker_model` loads the model and allocates the KV memory, on one rank or on several. `rank_transfer` opens the
transports and the KV transfer of the ranks. `worker_info` has the worker's identity and its answer to the rpc Describe.
Read `worker_model` first.
"""
