"""Test how the type of a link is derived from counters that rose, and from the two ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.transfer.link_detection import Counters, LinkEndpoints, detect_link_type, read_counters

MB = 10**6
NEAR = LinkEndpoints("nixl", True, "cpu", "cpu")
FAR = LinkEndpoints("nixl", False, "cpu", "cpu")
GPUS = LinkEndpoints("nixl", True, "cuda:0", "cuda:1")
Seen = tuple[int, Counters, Counters, Counters]


def moved(*, rdma: int = 0, network: int = 0, usual: int = 0) -> Seen:
    """100 MB were read in a second, after half a second of watching in which `usual` bytes came to the network."""
    return (
        100 * MB,
        Counters(0.0, {"mlx5_0/1": 5}, {"eth0": 7, "lo": 1}),
        Counters(0.5, {"mlx5_0/1": 5}, {"eth0": 7 + usual, "lo": 1}),
        Counters(1.5, {"mlx5_0/1": 5 + rdma}, {"eth0": 7 + usual + network, "lo": 1}),
    )


@pytest.mark.parametrize(
    ("seen", "ends", "link_type"),
    [
        (moved(), NEAR, "shared_memory"),
        (moved(), GPUS, "cuda_ipc"),
        (moved(), LinkEndpoints("nixl", True, "cuda:0", "cpu"), "shared_memory"),
        (moved(), FAR, "unknown"),
        (moved(rdma=101 * MB), FAR, "rdma"),
        (moved(rdma=101 * MB), GPUS, "rdma"),
        (moved(rdma=89 * MB), FAR, "unknown"),
        (moved(network=103 * MB), FAR, "tcp"),
        (moved(network=103 * MB), GPUS, "tcp"),
        # TCP over InfiniBand raises both.
        (moved(network=103 * MB, rdma=103 * MB), FAR, "tcp"),
        # What came all the time is not ours.
        (moved(network=103 * MB, usual=50 * MB), GPUS, "cuda_ipc"),
        (moved(network=203 * MB, usual=50 * MB), GPUS, "tcp"),
        (moved(network=103 * MB), LinkEndpoints("local", True, "cpu", "cpu"), "shared_memory"),
    ],
)
def test_the_link_type_is_what_rose(seen: Seen, ends: LinkEndpoints, link_type: str) -> None:
    assert detect_link_type(*seen, ends)[0] == link_type


def test_the_evidence_names_the_counters_that_rose_most() -> None:
    _, evidence = detect_link_type(*moved(rdma=101 * MB, network=MB), FAR)
    assert evidence == (
        "of 100.0 MB read, network interfaces received 1.0 MB (eth0 most), RDMA ports 101.0 MB (mlx5_0/1 most)"
    )
    bare = Counters(0.0, {}, {})
    assert "RDMA ports nothing: there are none" in detect_link_type(MB, bare, bare, bare, FAR)[1]


def test_an_interface_that_appeared_meanwhile_is_ignored() -> None:
    before, after = Counters(0.0, {}, {}), Counters(1.0, {}, {"eth1": 500 * MB})
    assert detect_link_type(MB, before, before, after, NEAR)[0] == "shared_memory"


def test_counters_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    ports = "sys/class/infiniband"
    write(f"{ports}/mlx5_0/ports/1/counters/port_rcv_data", "1000\n")
    write(f"{ports}/mlx5_1/ports/1/counters/port_rcv_data", "unreadable\n")
    write(f"{ports}/efa_0/ports/1/hw_counters/rx_bytes", "70\n")
    write(f"{ports}/efa_0/ports/1/hw_counters/rdma_read_bytes", "900\n")
    write(
        "proc/net/dev",
        "Inter-|   Receive                                                |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo: 5000 40 0 0 0 0 0 0 5000 40 0 0 0 0 0 0\n"
        "  eth0:123456789 99 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n",
    )
    counters = read_counters(3.0, tmp_path)
    assert counters == Counters(3.0, {"efa_0/1": 970, "mlx5_0/1": 4000, "mlx5_1/1": 0}, {"lo": 5000, "eth0": 123456789})
    assert read_counters(4.0, tmp_path / "nothing") == Counters(4.0, {}, {})
