"""Record what happens to each request of the gateway: one record and one trace span, metrics, and a log line.

`request_recorder.RequestRecorder` follows the open requests; at the end of one it makes a
`request_record.RequestRecord` and passes it to the observers (`request_metrics`, `request_log`, the console, the
demand counts). `token_timing` measures the times between tokens, `root_span` ends the span, and `endpoint_metrics`
exports the few figures that an endpoint picker reads. Read `request_recorder` first.
"""
