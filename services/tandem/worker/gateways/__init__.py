"""The worker's side of its gateways: worker.proto's service, one outbox per gateway, and the prefix index events.

Start with `service`; `outbox` holds what each gateway's stream is still to send.
"""
