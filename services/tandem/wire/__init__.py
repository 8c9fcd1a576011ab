"""Encode and decode the messages between Tandem's processes, authenticate calls, and open gRPC channels and servers.

This package (import layer 4) alone imports the generated protobuf code. `peer_auth.PeerAuth` makes the channels, stubs
and servers of a program; it uses `call_auth` (signatures), `secret_file` and `tls`. `job_codec`, `worker_codec` and
`link_codec` convert the messages of worker.proto, `kv_codec` those of kv.proto, and `rank_codec` the messages between
the ranks of one worker. Read `peer_auth` and `worker_codec` first.
"""
