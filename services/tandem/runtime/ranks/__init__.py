"""Run one model on several tensor-parallel ranks: the first rank leads, the others follow its commands.

`leader` wraps the first rank's model and cache so that each call is executed on all ranks; read it first. `follower`
executes the commands on another rank. `packed_batch` packs a batch into one tensor to broadcast, and `rank_context`
describes a rank's position and connections to the loader."""
