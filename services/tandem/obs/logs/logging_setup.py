"""Sets up how a program logs, the same for all of Tandem's; never what it logs.

A line is written before the call that logs it returns: the last lines before a crash are those that matter.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

from tandem.core.clock import Clock, SystemClock
from tandem.core.config import TelemetryConfig
from tandem.obs.logs.log_formatters import JsonFormatter, Origin, TextFormatter
from tandem.obs.logs.log_handler import LineHandler
from tandem.obs.logs.log_rate_limit import LogLimit
from tandem.obs.metrics.instruments import LOG_LINES_DROPPED
from tandem.obs.metrics.metrics import Metrics

NOISY = ("asyncio", "grpc", "httpx", "httpcore", "uvicorn")
"""Of these only what is a warning at least."""

_log = logging.getLogger(__name__)


def set_up_logging(
    telemetry: TelemetryConfig,
    service: str,
    instance: str = "",
    handlers: Sequence[logging.Handler] = (),
    clock: Clock | None = None,
) -> None:
    """All that is logged in this process goes to the `handlers`, to standard error where none are given. To be
    called once. `instance`: this machine and process where it is empty."""
    handlers = list(handlers) or [LineHandler(sys.stderr)]
    origin = Origin(service, instance or f"{socket.gethostname()}-{os.getpid()}", os.getpid())
    is_json = telemetry.log_format == "json"
    limit = LogLimit(clock or SystemClock(), handlers)
    for handler in handlers:
        handler.setFormatter(JsonFormatter(origin) if is_json else TextFormatter())
        handler.addFilter(limit)
    atexit.register(limit.flush)
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(telemetry.log_level.upper())
    for noisy in NOISY:
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    if is_json:
        _log_what_is_printed()


def watch_dropped(metrics: Metrics) -> None:
    """Count the lines that this process leaves out."""
    metrics.watch(LOG_LINES_DROPPED, lambda: {(): sum(limit.num_dropped for limit in _limits())})


def _limits() -> Iterator[LogLimit]:
    """Of this process, each once."""
    found = (each for handler in logging.getLogger().handlers for each in handler.filters)
    yield from dict.fromkeys(each for each in found if isinstance(each, LogLimit))


def _log_what_is_printed() -> None:
    """What the interpreter itself would print becomes a line like any other: warnings, and what nobody caught."""
    logging.captureWarnings(True)
    sys.excepthook = _uncaught

    def in_thread(caught: threading.ExceptHookArgs) -> None:
        if caught.exc_value is not None:
            _uncaught(caught.exc_type, caught.exc_value, caught.exc_traceback)

    threading.excepthook = in_thread


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, Exception):
        _log.critical("nobody caught what was raised", exc_info=(kind, error, trace))
    else:
        sys.__excepthook__(kind, error, trace)
