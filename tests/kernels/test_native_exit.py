"""A process that ends while a thread is inside a compiled kernel takes nothing away from that thread."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import atexit, threading, time

calls = 0

def tell():
    before, until = calls, time.monotonic() + 20
    while calls < before + 3 and time.monotonic() < until:
        time.sleep(0.01)
    print("still running" if calls >= before + 3 else "stuck", flush=True)

atexit.register(tell)  # before anything else registers: the last to be called

import torch
from tandem_kernels.native.library import Into, Team, linear, matrix_of
from tandem_kernels.native.pack import pack_linear
from tandem_kernels.native.pack_codes import PackedMatrix

team, x, y = Team(2), torch.ones(256, 512), torch.empty(256, 512)
panels, inside = pack_linear(torch.ones(512, 512)), threading.Event()
weights = matrix_of(PackedMatrix(panels), 512, 512)

def work():
    global calls
    while True:
        linear(team, x, weights, Into.STORE, y)
        calls += 1
        inside.set()

threading.Thread(target=work, daemon=True).start()
inside.wait()
"""


def test_the_end_of_the_process_takes_nothing_from_a_running_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "still running\n", "")
