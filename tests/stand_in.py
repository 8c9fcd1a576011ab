"""The CPU in a GPU's place, for all that is composed for one; never a fake of what computes."""

from __future__ import annotations

import pytest
import torch

from tandem.runtime import model_loader
from tandem.runtime.device_stream import DeviceStream
from tandem_kernels.dispatch import REFERENCE


def stand_in_for_a_gpu(patch: pytest.MonkeyPatch, total_bytes: int, reserved_bytes: int = 1 << 20) -> None:
    """Of so much memory, all of it free; `reserved_bytes` of it hold weights."""
    patch.setattr(model_loader, "open_cuda", lambda rank: torch.device("cpu"))
    patch.setattr(model_loader, "device_kernels", lambda device, **_: REFERENCE)
    patch.setattr(model_loader, "CudaStream", lambda device: DeviceStream())
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (total_bytes, total_bytes))
    patch.setattr(torch.cuda, "memory_reserved", lambda device: reserved_bytes)
    for name in ("synchronize", "empty_cache"):
        patch.setattr(torch.cuda, name, lambda *_: None)
    patch.setattr(torch.cuda, "get_device_name", lambda device: "none")
