"""The gateway's driver of `tandem.orchestration`: it admits requests, carries out commands and feeds back events.

Start with `driver.RequestDriver`; `active_request` is the stream that a front end reads.
"""
