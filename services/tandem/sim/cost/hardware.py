"""List the peak figures of accelerators and their rental prices, each with its provenance.

The share of a peak figure that a program reaches is in `roofline.Efficiency`. Each figure was looked up in November
2026 in a copy of the table that its provenance names; the vendors' own pages were not available. Figures "with
sparsity" are halved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Peak figures of one accelerator, in bytes and bytes per second.

    - `flops`, `fp8_flops`: dense operations per second; `fp8_flops` is 0 for hardware without fp8 products.
    - `peer_bandwidth`: to the other accelerators of its machine; `network_bandwidth`: to other machines;
      `host_bandwidth`: to its machine's memory; each in one direction.
    - `price_per_hour`: in any currency; 0 when it is not set.
    - `provenance`, `price_provenance`: the sources of the figures and of the price.
    """

    name: str
    memory_bandwidth: float
    flops: float
    fp8_flops: float
    memory_bytes: float
    peer_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    provenance: str
    price_per_hour: float = 0.0
    price_provenance: str = "as given"


GBIT_400, GBIT_200 = 50e9, 25e9
PCIE_5, PCIE_4 = 64e9, 32e9
"""Bytes per second of 16 lanes in one direction; the data sheets name 128 and 64 GB/s for both directions together."""
_LISTED = "list price of one cloud (Nebius) in US dollars, on demand, from SkyPilot's catalogue v8 of 2026"

H100 = Hardware(
    name="h100",
    memory_bandwidth=3.35e12,
    flops=989e12,
    fp8_flops=1979e12,
    memory_bytes=80e9,
    peer_bandwidth=450e9,
    network_bandwidth=GBIT_400,
    host_bandwidth=PCIE_5,
    provenance="H100 SXM data sheet (3.35 TB/s; fp8 3,958 and bf16 1,979 with sparsity; NVLink 900 GB/s both ways); "
    "one 400 Gb/s port per GPU, as in DGX H100",
    price_per_hour=2.95,
    price_provenance=_LISTED,
)
H200 = replace(
    H100,  # with another memory
    name="h200",
    memory_bandwidth=4.8e12,
    memory_bytes=141e9,
    provenance="H200 SXM data sheet (141 GB, 4.8 TB/s; fp8 3,958 and bf16 1,979 with sparsity; NVLink 900 GB/s both "
    "ways); one 400 Gb/s port per GPU, as in DGX H200",
    price_per_hour=3.50,
)
B200 = Hardware(
    name="b200",
    memory_bandwidth=8.0e12,
    flops=2.25e15,
    fp8_flops=4.5e15,
    memory_bytes=180e9,
    peer_bandwidth=900e9,
    network_bandwidth=GBIT_400,
    host_bandwidth=PCIE_5,
    provenance="DGX B200 data sheet, an eighth of it (1,440 GB, 64 TB/s, fp8 72 PFLOP/s with sparsity, bf16 half of "
    "that, NVLink 14.4 TB/s both ways); one 400 Gb/s port per GPU",
    price_per_hour=5.50,
    price_provenance=_LISTED,
)
A100 = Hardware(
    name="a100",
    memory_bandwidth=2.039e12,
    flops=312e12,
    fp8_flops=0.0,
    memory_bytes=80e9,
    peer_bandwidth=300e9,
    network_bandwidth=GBIT_200,
    host_bandwidth=PCIE_4,
    provenance="A100 80 GB SXM data sheet r4 (2,039 GB/s, bf16 312, NVLink 600 GB/s both ways); one 200 Gb/s port per "
    "GPU, as in DGX A100",
    price_per_hour=1.30,
    price_provenance="middle of 1.10 to 1.50 US dollars, specialised clouds on demand, Mercatus, May 2026",
)
L40S = Hardware(
    name="l40s",
    memory_bandwidth=864e9,
    flops=362.05e12,
    fp8_flops=733e12,
    memory_bytes=48e9,
    peer_bandwidth=32e9,
    network_bandwidth=GBIT_200,
    host_bandwidth=PCIE_4,
    provenance="L40S data sheet (48 GB, 864 GB/s, bf16 362.05, fp8 733; no NVLink: PCIe 4.0 x16, 64 GB/s both ways); "
    "one 200 Gb/s port per GPU is an assumption",
    price_per_hour=1.55,
    price_provenance=_LISTED,
)

HARDWARE = {hardware.name: hardware for hardware in (H100, H200, B200, A100, L40S)}
"""The accelerators by name."""
