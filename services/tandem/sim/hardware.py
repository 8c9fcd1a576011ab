"""What accelerators can do at best, each figure with where it comes from; never says what a program reaches of it.

The figures were written down from memory of the sources that they name and are still to be compared with them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator. Bytes and bytes per second; `flops`: dense bf16, without sparsity, per second.

    `peer_bandwidth` is to others in its machine and `network_bandwidth` to other machines, one way each.
    `price_per_hour` is a setting in whatever currency; 0: not set. `provenance`: where the figures come from.
    """

    name: str
    memory_bandwidth: float
    flops: float
    memory_bytes: float
    peer_bandwidth: float
    network_bandwidth: float
    provenance: str
    price_per_hour: float = 0.0


GBIT_400, GBIT_200 = 50e9, 25e9

H100 = Hardware(
    name="h100",
    memory_bandwidth=3.35e12,
    flops=989e12,
    memory_bytes=80e9,
    peer_bandwidth=450e9,
    network_bandwidth=GBIT_400,
    provenance="NVIDIA data sheet H100 SXM (bf16 1,979 with sparsity, NVLink 900 GB/s both ways); one 400 Gb/s port "
    "per GPU, as in DGX H100",
)
H200 = Hardware(
    name="h200",
    memory_bandwidth=4.8e12,
    flops=989e12,
    memory_bytes=141e9,
    peer_bandwidth=450e9,
    network_bandwidth=GBIT_400,
    provenance="NVIDIA data sheet H200 SXM (bf16 1,979 with sparsity, NVLink 900 GB/s both ways); one 400 Gb/s port "
    "per GPU, as in DGX H200",
)
B200 = Hardware(
    name="b200",
    memory_bandwidth=8.0e12,
    flops=2.25e15,
    memory_bytes=180e9,
    peer_bandwidth=900e9,
    network_bandwidth=GBIT_400,
    provenance="NVIDIA data sheet DGX B200, an eighth of it (64 TB/s, bf16 36 PFLOP/s with sparsity, 1,440 GB, NVLink "
    "14.4 TB/s both ways); one 400 Gb/s port per GPU",
)
A100 = Hardware(
    name="a100",
    memory_bandwidth=2.039e12,
    flops=312e12,
    memory_bytes=80e9,
    peer_bandwidth=300e9,
    network_bandwidth=GBIT_200,
    provenance="NVIDIA data sheet A100 80 GB SXM (bf16 312, NVLink 600 GB/s both ways); one 200 Gb/s port per GPU, as "
    "in DGX A100",
)
L40S = Hardware(
    name="l40s",
    memory_bandwidth=864e9,
    flops=362e12,
    memory_bytes=48e9,
    peer_bandwidth=32e9,
    network_bandwidth=GBIT_200,
    provenance="NVIDIA data sheet L40S (bf16 362.05; no NVLink: PCIe 4.0 x16, 64 GB/s both ways); one 200 Gb/s port "
    "per GPU is an assumption",
)

HARDWARE = {one.name: one for one in (H100, H200, B200, A100, L40S)}
"""By name."""
