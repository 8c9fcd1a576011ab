"""Whom this process is taken for where it is a controller of Serve; never tells anybody.

Apart from the policy, which Serve copies by value: a name in there would be the one of the process that it was copied
from, and another one for each deployment.
"""

from __future__ import annotations

import os
import secrets
import socket

from tandem.core.ids import ServeId

_NAME = ServeId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


def serve_name() -> ServeId:
    return _NAME
