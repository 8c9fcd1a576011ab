"""Keep the loaded text models of the bundles that workers serve, one per digest."""

from __future__ import annotations

import asyncio
import logging
from typing import Literal

from tandem.core.bundle import TokenizerBundle
from tandem.core.errors import ErrorKind, TandemError
from tandem.gateway.text.text_model import TextModel

log = logging.getLogger(__name__)


class TextModels:
    """Load the text models of tokenizer bundles and keep them. `generation_config`: as for TextModel. `keep_bundles`:
    keep the bundles too, some megabytes each.

    Each text model is loaded once, in a thread. Loading a tokenizer of 49,000 tokens takes 0.5 s and stalls the event
    loop for that time, because all constructors of `Tokenizer` in tokenizers 0.23, such as `from_buffer`, hold the GIL.
    It happens when the first worker of a model appears, which for most gateways is before they are ready."""

    def __init__(self, generation_config: Literal["auto", "none"] = "auto", *, keep_bundles: bool = False) -> None:
        self._generation_config = generation_config
        self._keep_bundles = keep_bundles
        self._loaded: dict[str, TextModel] = {}
        self._bundles: dict[str, TokenizerBundle] = {}
        self._lock = asyncio.Lock()

    async def load(self, digest: str, bundle: TokenizerBundle) -> TextModel:
        """Return the text model of the bundle with this digest. The first call loads it, and other calls wait
        meanwhile; later calls return the same object. Raises INTERNAL where the bundle cannot be read or does not match
        `digest`."""
        async with self._lock:
            if digest not in self._loaded:
                self._loaded[digest] = await asyncio.to_thread(self._read, digest, bundle)
                if self._keep_bundles:
                    self._bundles[digest] = bundle
            return self._loaded[digest]

    def bundle(self, digest: str) -> TokenizerBundle:
        """Return the bundle of a loaded text model. Raises KeyError unless `keep_bundles` is set and a model with this
        digest was loaded."""
        return self._bundles[digest]

    def _read(self, digest: str, bundle: TokenizerBundle) -> TextModel:
        if bundle.digest != digest:
            raise TandemError(ErrorKind.INTERNAL, f"the tokenizer bundle does not match its digest {digest}")
        model = TextModel(bundle, digest=digest, generation_config=self._generation_config)
        if model.unserved_defaults:
            log.info("the model recommends %s, which Tandem ignores", ", ".join(model.unserved_defaults))
        return model
