"""Recorded logs of UCX 1.23 on its choice of transports, cut to the relevant lines."""

from __future__ import annotations

_STAMP = "[1795364986.531795] [vm:20073:0]   "

_AVAILABLE = """\
+--------------------------------------------------------------------------------------------------+
| Available Transports and Devices (ctx: consumer)                                                    |
+------------+-----------+-------------+-----------------------------------------------------------+
| Type       | Component | Transport   | Device (System device)                                    |
+------------+-----------+-------------+-----------------------------------------------------------+
{rows}
+------------+-----------+-------------+-----------------------------------------------------------+
| Legend: + = enabled, - = disabled                                                                |
| All of the available transports are listed, some may be disabled or unsupported on your system.  |
+------------+-----------+-------------+-----------------------------------------------------------+
"""
_HOST_ROWS = """\
| network    | tcp       | + tcp       | + eth0  + lo                                              |
+------------+-----------+-------------+-----------------------------------------------------------+
| intra-node | sysv      | + sysv      | + memory                                                  |
|            +-----------+-------------+-----------------------------------------------------------+
|            | cma       | + cma       | + memory                                                  |"""
_CARD_ROWS = """
+------------+-----------+-------------+-----------------------------------------------------------+
| network    | mlx5_0    | + rc_mlx5   | + mlx5_0:1 (0)  - mlx5_1:1 (0)                            |
|            |           +-------------+-----------------------------------------------------------+
|            |           | - dc_mlx5   | + mlx5_0:1 (0)                                            |"""
_TABLE = """\
+--------+-------------+------------------------------------------------------------------+
| consumer {peer} cfg#1                                                                       |
| {operation}                 |
+--------+-------------+------------------------------------------------------------------+
| Range  | Description |                              Config                              |
+--------+-------------+------------------------------------------------------------------+
|  0..99 | short       | tcp/small                                                        |
{row}
+--------+-------------+------------------------------------------------------------------+
"""
_READ = "remote memory read by ucp_get*(multi) into host memory from host"
_WRITE = "remote memory write by ucp_put* from host memory to host"


def log(read: str, *, has_card: bool = False, extra: str = "") -> str:
    """Return the log of a consumer whose reads of large blocks use `read`, as "zero-copy   | cma/memory"."""
    rows = _HOST_ROWS + (_CARD_ROWS if has_card else "")
    own = _TABLE.format(peer="self", operation=_READ, row="| 100..inf | zero-copy   | cma/own |")
    write = _TABLE.format(peer="intra-node", operation=_WRITE, row="| 100..inf | zero-copy   | cma/write |")
    table = _TABLE.format(peer="intra-node", operation=_READ, row=f"| 100..inf | {read} |")
    version = "    ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from /usr/lib/libucp.so.0)\n"
    other = "      ucp_worker.c:1997 UCX  DEBUG a line between\n"
    text = version + extra + _AVAILABLE.format(rows=rows) + other + own + other + table + other + write
    return "".join(f"{_STAMP}{line}\n" for line in text.splitlines())
