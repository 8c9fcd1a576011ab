"""The worker's side of its gateways: worker.proto's service, one outbox per gateway, and the prefix index events.

Start with `service`; `effect_dispatcher` carries the engine's effects to outboxes, streams and reads.
"""
