"""Start, await and stop the gateway process of `tandem serve`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from tandem.core.config import Config, value_of
from tandem.core.settings import settings
from tandem.stores.redis_supervisor import die_with

GATEWAY = (sys.executable, "-m", "tandem.cli", "gateway")
POLL_S = 0.1
STOP_MARGIN_S = 10.0
"""Seconds beyond `gateway.drain_s` before the gateway is killed."""


class GatewayProcess:
    """Starts a gateway process and stops it at the end of the `with` block.

    The process gets all settings of `config` by environment variables, and receives SIGTERM when this process ends for
    any reason. `command`: command line of the gateway process. `url`, `grpc_target`: addresses of the gateway, known
    after `wait_until_listening`."""

    def __init__(self, config: Config, command: Sequence[str] = GATEWAY) -> None:
        self._stop_s = config.gateway.drain_s + STOP_MARGIN_S
        self._process = subprocess.Popen(
            command,
            env=os.environ | {leaf.env: str(value_of(config, leaf.key)) for leaf in settings()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal must reach only the parent, which stops its parts in order
            preexec_fn=die_with(os.getpid(), signal.SIGTERM),
        )
        self.url = ""
        self.grpc_target = ""

    def wait_until_listening(self) -> bool:
        """Block until the gateway prints its addresses, and store them in `url` and `grpc_target`.

        Returns True, or False if the gateway ended before it printed them."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return False
        addresses = json.loads(line)
        self.url = addresses["url"]
        self.grpc_target = addresses["grpc"]
        return True

    def wait_until_ready(self, timeout_s: float) -> str | None:
        """Block until the gateway can serve requests (`/ready` succeeds), for at most about `timeout_s` seconds.

        Returns None if it can; otherwise the reason as text: the timeout has passed, or the gateway has ended."""
        problem = "it does not answer"
        for _ in range(int(timeout_s / POLL_S)):
            if self._ends_within(POLL_S):
                return f"it ended with code {self.exit_code()}"
            try:
                with _DIRECT.open(f"{self.url}/ready", timeout=5):
                    return None
            except urllib.error.HTTPError as error:
                problem = error.read().decode(errors="replace")
            except OSError as error:
                problem = str(error)
        return f"after {timeout_s:g} s {problem}"

    def exit_code(self) -> int | None:
        return self._process.poll()

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let the gateway drain and wait for its end. If it has not ended after `gateway.drain_s` + `STOP_MARGIN_S`
        seconds, kill it.

        Does nothing to a gateway that has ended."""
        self._process.terminate()
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ends_within(self, wait_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        return self.exit_code() is not None


def _unverified() -> ssl.SSLContext:
    """Return a context that accepts every certificate: ours need not be valid for the address at which we listen."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


_DIRECT = urllib.request.build_opener(
    urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_unverified())
)
"""Opens URLs of the own gateway: without the HTTP proxy from the environment, which is for external traffic, and
without a check of its certificate."""
