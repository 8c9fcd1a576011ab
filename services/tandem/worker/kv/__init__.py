"""Hand KV over between workers, over the rpc StreamHandoff and the worker's KV transfer.

On the producer's side `handoff_service` passes consumers' requests to the engine and sends them announcements of
blocks. On the consumer's side `producer_session` keeps one stream to each source (a producer that this worker reads
from), `handshake` verifies the source, and `transfer_client` starts the reads and reports their ends to the engine.
Read `handoff_service` first, then `producer_session`.
"""
