"""Keep the KV blocks of one worker, their hashes and the values of a hand-off as plain data, without tensors.

The package records which sequence, lease or read holds each device block (`block_pool`), manages copies of evicted
blocks in host memory (`host_offload`), and computes the hashes under which the prefix cache finds blocks (`hashing`).
It also defines the memory layout of a block (`layout`), the states of leases and pulls (`handoff`), and the events that
fill the prefix index (`kv_event_log`). The engine's scheduler calls it; KV bytes are moved elsewhere, in `transfer` and
by executors. Read `block_pool` first.
"""
