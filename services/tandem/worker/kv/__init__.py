"""The KV hand-off between workers: the producer's service, the consumer's streams to producers, and the reads.

The producer side is `handoff_service`; the consumer side is `producer_session` and `transfer_client`."""
