"""List the settings that must be equal for all ranks of one worker."""

from __future__ import annotations

from importlib import metadata

from tandem.core.config import Config, value_of
from tandem.core.device_defaults import with_device_defaults
from tandem.core.settings import settings

_OF_ONE_MACHINE = frozenset(
    {
        *("model.id", "model.cache_dir", "model.served_name", "model.generation_config"),
        *("engine.node_rank", "engine.master_addr", "engine.master_port"),
        *("engine.num_threads", "engine.gpu_memory_utilization"),
    }
)
"""Settings of model and engine that may differ between machines. The model's files are compared once they are
loaded."""
_OTHERS = ("transfer.backend",)


def shared_settings(config: Config) -> dict[str, str]:
    """Return what must be equal for all ranks of one worker, as texts by name: the version of Tandem, and the settings
    that decide how a model is divided and what a rank computes. A setting that is left to the device has the device's
    default."""
    config = with_device_defaults(config)
    keys = [setting.key for setting in settings() if setting.section in ("model", "engine")]
    chosen = [*(key for key in keys if key not in _OF_ONE_MACHINE), *_OTHERS]
    return {"version": metadata.version("tandem")} | {key: str(value_of(config, key)) for key in chosen}
