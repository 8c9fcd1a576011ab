"""What the gateway records of requests: one record and one span each, metrics, log lines and token timing.

Start with `request_recorder`, which follows an open request; `request_record` is what is left of it at its end.
"""
