"""Set up logging of a program, the same for all programs of Tandem.

A line is written before the logging call returns, so that the last lines before a crash are not lost."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from tandem.core.clock import SystemClock
from tandem.core.config import TelemetryConfig
from tandem.obs.logs.log_formatters import JsonFormatter, TextFormatter
from tandem.obs.logs.log_handler import LineHandler
from tandem.obs.logs.log_rate_limit import LogLimit
from tandem.obs.metrics.instruments import LOG_LINES_DROPPED
from tandem.obs.metrics.metrics import Metrics

NOISY = ("asyncio", "grpc", "httpx", "httpcore", "uvicorn")
"""Libraries that log at WARNING and above only."""

_log = logging.getLogger(__name__)


def set_up_logging(
    telemetry: TelemetryConfig,
    service: str,
    instance: str = "",
    handlers: Sequence[logging.Handler] = (),
) -> None:
    """Write all log records of this process to `handlers`, or to standard error where none are given. Call it once.

    `service` and `instance` appear in JSON lines; an empty `instance` is replaced by host name and process id.
    `telemetry` sets format and level."""
    handlers = list(handlers) or [LineHandler(sys.stderr)]
    instance = instance or f"{socket.gethostname()}-{os.getpid()}"
    origin = {"service": service, "instance": instance, "pid": os.getpid()}
    is_json = telemetry.log_format == "json"
    limit = LogLimit(SystemClock(), handlers)
    for handler in handlers:
        handler.setFormatter(JsonFormatter(origin) if is_json else TextFormatter())
        handler.addFilter(limit)
    atexit.register(limit.flush)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(telemetry.log_level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    if is_json:
        _log_interpreter_output()


def watch_dropped(metrics: Metrics) -> None:
    """Register the metric that counts the log lines dropped by the limit on repeated lines."""
    metrics.watch(LOG_LINES_DROPPED, lambda: {(): sum(limit.num_dropped for limit in _limits())})


def _limits() -> Iterator[LogLimit]:
    """Yield the log limits of this process, each once."""
    found = (each for handler in logging.getLogger().handlers for each in handler.filters)
    yield from dict.fromkeys(each for each in found if isinstance(each, LogLimit))


def _log_interpreter_output() -> None:
    """Log warnings and uncaught exceptions, which the interpreter would print."""
    logging.captureWarnings(True)
    sys.excepthook = _uncaught

    def in_thread(caught: threading.ExceptHookArgs) -> None:
        if caught.exc_value is not None:
            _uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)

    threading.excepthook = in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, Exception):
        _log.critical("uncaught exception", exc_info=(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)
