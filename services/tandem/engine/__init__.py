"""The engine of one worker as pure state: it joins the scheduler, the KV block pool and the KV hand-offs.

`engine.Engine` is the entry point: `submit` accepts a job, `begin` plans a step, `finish` applies its result, and every
method returns the effects that the driver (`worker.engine.driver`) has to carry out. `factory.build_engine` builds one
from a configuration. `kv_producer` owns the leases on blocks that other workers read, `kv_consumer` the pulls of blocks
from other workers, and `migration` the offers of running and preempted sequences to other workers. `effects`, `ports`,
`transfer_messages` and `rank_messages` define what crosses the border to drivers, executors, transports and ranks.
Nothing here does I/O or reads a clock. Read `engine` first, then `effects`.
"""
