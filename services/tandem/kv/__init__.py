"""Floor 1, KV blocks, their hashes and their hand-off as plain data; never holds a tensor."""
