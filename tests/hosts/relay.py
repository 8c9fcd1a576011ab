"""Forward Ethernet frames between two TAP devices with a delay, losses and a limited rate, which can change meanwhile.

`python relay.py NAME NAME` makes the devices and prints a line. Each line on standard input, as `delay_s loss
bytes_per_s`, holds from then on in both directions; the process ends at the end of its input. It does what `tc netem`
does where the kernel has no netem.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import selectors
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x0002 | 0x1000
MAX_WAITING_BYTES = 1 << 20
"""Bytes that wait in one direction; further frames are dropped, as by a router."""


class Direction:
    """Frames from one device to the other, in their order."""

    def __init__(self, target: int) -> None:
        self.due: list[tuple[float, int, bytes]] = []
        self._target = target
        self._free_at = 0.0
        self._num_bytes = 0
        self._number = 0

    def enter(self, frame: bytes, now: float, delay_s: float, loss: float, bytes_per_s: float) -> None:
        if random.random() < loss or self._num_bytes + len(frame) > MAX_WAITING_BYTES:
            return
        self._free_at = max(self._free_at, now) + len(frame) / bytes_per_s
        self._number += 1
        self._num_bytes += len(frame)
        heapq.heappush(self.due, (self._free_at + delay_s, self._number, frame))

    def deliver(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            _, _, frame = heapq.heappop(self.due)
            self._num_bytes -= len(frame)
            try:
                os.write(self._target, frame)
            except OSError:  # the device is down
                continue


def open_tap(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return device


def main() -> None:
    ends = [open_tap(name) for name in sys.argv[1:3]]
    directions = {ends[0]: Direction(ends[1]), ends[1]: Direction(ends[0])}
    quality = (0.0, 0.0, float("inf"))
    selector = selectors.DefaultSelector()
    for readable in (*ends, sys.stdin.fileno()):
        selector.register(readable, selectors.EVENT_READ)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        now = time.monotonic()
        waits = [direction.due[0][0] - now for direction in directions.values() if direction.due]
        for key, _ in selector.select(max(0.0, min(waits, default=1.0))):
            if key.fd == sys.stdin.fileno():
                if not (line := sys.stdin.readline()):
                    return
                delay_s, loss, bytes_per_s = map(float, line.split())
                quality = delay_s, loss, bytes_per_s
                continue
            for _ in range(64):
                try:
                    frame = os.read(key.fd, 1 << 16)
                except OSError:
                    break
                directions[key.fd].enter(frame, time.monotonic(), *quality)
        now = time.monotonic()
        for direction in directions.values():
            direction.deliver(now)


if __name__ == "__main__":
    main()
