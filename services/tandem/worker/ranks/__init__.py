"""Start the tensor-parallel ranks beside the first one, each in a process of its own, and exchange messages with them.

`rank_group.RankGroup` is the entry point: it starts the ranks, sends them commands and notices when one is lost.
`local_rank` starts a rank as a child process, `ray_rank` as a Ray actor. `rank_channel` carries messages between the
processes, and `remote_transfer` the commands and events of a rank's KV transfer. Read `rank_group` first.
"""
