"""Make the /sys and /proc of a machine with a GPU and several RDMA devices."""

from __future__ import annotations

from pathlib import Path

GPU = "0000:1b:00.0"
_ABOVE_GPU = "pci0000:15/0000:15:01.0/0000:16:00.0"
"""Root complex, root port and switch of the GPU."""
_CARDS = {
    "mlx5_0": f"{_ABOVE_GPU}/0000:17:00.0/0000:1c:00.0",
    "mlx5_1": f"{_ABOVE_GPU}/0000:17:01.0/0000:1d:00.0",
    "mlx5_2": "pci0000:15/0000:15:03.0/0000:26:00.0/0000:27:00.0",
    "mlx5_3": "pci0000:97/0000:97:01.0/0000:98:00.0",
    "mlx5_4": "pci0000:97/0000:97:01.0/0000:99:00.0",
}


def make_machine(root: Path) -> None:
    """Make two RDMA devices behind the switch of the GPU, one behind another switch of the same root complex, one on
    the other socket, and one there without a cable, all with one port; and the interfaces lo, eth0 and eth1."""
    devices = root / "sys/devices"
    for name, place in _CARDS.items():
        (devices / place).mkdir(parents=True)
        port = root / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
        (root / "sys/class/infiniband" / name / "device").symlink_to(devices / place)
    disconnect(root, "mlx5_4")
    gpu = devices / _ABOVE_GPU / "0000:17:02.0" / GPU
    gpu.mkdir(parents=True)
    (root / "sys/bus/pci/devices").mkdir(parents=True)
    (root / "sys/bus/pci/devices" / GPU).symlink_to(gpu)
    (root / "proc/driver/nvidia/gpus" / GPU).mkdir(parents=True)
    for name in ("lo", "eth0", "eth1"):
        (root / "sys/class/net" / name).mkdir(parents=True)


def disconnect(root: Path, *cards: str) -> None:
    """Take the cables of these RDMA devices out."""
    for card in cards:
        (root / "sys/class/infiniband" / card / "ports/1/state").write_text("1: DOWN\n")
