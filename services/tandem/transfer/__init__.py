"""Move KV blocks between workers over NIXL or shared memory; which blocks move is decided in `kv` and `engine`."""
