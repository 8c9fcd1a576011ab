"""Give this process, a controller of Ray Serve, a unique name.

The name is not in `serve_policy`, because Serve copies that module by value: a name in it would be that of the process
from which it was copied, and differ between deployments.
"""

from __future__ import annotations

import os
import secrets
import socket

from tandem.core.ids import ServeId

_NAME = ServeId(f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}")


def serve_name() -> ServeId:
    return _NAME
