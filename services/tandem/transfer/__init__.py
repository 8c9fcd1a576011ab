"""Read KV blocks from other workers' memory: over NIXL, over TCP or, on one host, by process_vm_readv.

`kv` and `engine` decide which blocks are read. A worker opens a `KVTransfer` (`interface`), sends it commands from any
thread, and gets events back. `transfer_thread` runs one rank's transfer on a thread of its own, `transfer_engine` holds
that thread's decisions, and `multi_rank_transfer` merges the ranks of a worker into one `KVTransfer`. The bytes are
moved by a `Transport`: `nixl_transport`, `tcp_transport`, `process_vm_transport`, or `auto_transport`, which chooses
NIXL or TCP for each peer. Read `interface` first, then `transfer_engine`.
"""
