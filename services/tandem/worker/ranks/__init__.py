"""Start the tensor-parallel ranks beside the first one, each in a process of its own, and exchange messages with them.

`rank_group.RankGroup` is the entry point: it starts the ranks, sends them commands and notices when one is lost.
`local_rank` starts a rank as a child process, `ray_rank` as a Ray actor. `rank_listener` lets the processes connect, on
one machine or on several, `rank_channel` carries messages between them, `shared_settings` lists what must be equal for
all, and `remote_transfer` carries the commands and events of a rank's KV transfer. Read `rank_group` first.
"""
