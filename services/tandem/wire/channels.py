"""Define the gRPC channel and server options that every Tandem program shares."""

from __future__ import annotations

from typing import Any

import grpc.aio

MAX_MESSAGE_BYTES = 64 << 20

_COMMON: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A cut link raises no error by itself: pings detect it within 15 s, also on streams without traffic.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # Workers are in the same cluster: ignore HTTP proxies from the environment, which are for external traffic.
    ("grpc.enable_http_proxy", 0),
    # Reconnect to a restarted worker within seconds.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Channels to one address share no connection, so that a failing connection affects only its own channel.
    ("grpc.use_local_subchannel_pool", 1),
)

TLS_NAME = "tandem-cluster"
"""DNS name in every worker's certificate, checked instead of the address, because addresses of pods change."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # Accept the pings above.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would each get half of the calls; the second must fail to bind.
    ("grpc.so_reuseport", 0),
)


def open_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.aio.Channel:
    """Open a gRPC channel to `address`, host:port, which connects at the first call. Without `credentials` the channel
    is not encrypted.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options: list[tuple[str, Any]] = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME)]
    return grpc.aio.secure_channel(address, credentials, options=options)
