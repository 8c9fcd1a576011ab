"""Describe the endpoint that receives requests, and find the model that it serves."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Address and request format of a server.

    `path` is that of completions; `extra` holds fields that only this kind of server knows.
    """

    url: str
    model: str
    path: str = "/v1/completions"
    extra: dict[str, Any] = {}


ANSWER_TOKENS = {"return_token_ids": True}
"""Field that requests token ids; servers that do not know it ignore it."""


class NoEndpoint(Exception):
    """Raised when nothing at this URL lists a model."""


def base_url(url: str) -> str:
    """Return the URL without a trailing slash and without `/v1`, which OpenAI clients append."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def first_model(url: str, key: str | None = None) -> str:
    """Return the first model that the endpoint lists to the owner of `key`. Raises NoEndpoint."""
    place, headers = f"{url}/v1/models", {"authorization": f"Bearer {key}"} if key else None
    try:
        async with aiohttp.ClientSession() as session, session.get(place, headers=headers) as response:
            raw = await response.read()
            if response.status != 200:
                raise NoEndpoint(f"{place} answers {response.status}: {raw.decode(errors='replace')[:200]}")
            return str(msgspec.json.decode(raw)["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise NoEndpoint(f"{place}: {error}") from error
    except (LookupError, TypeError) as error:
        raise NoEndpoint(f"{place} lists no model") from error
