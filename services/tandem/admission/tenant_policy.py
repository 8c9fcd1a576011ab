"""Holds a request against its tenant's terms, all but quotas and models; never changes what will be computed.

A prefix cache tells who uses it what others have asked: a prompt that was seen before answers sooner. So the names of
blocks begin with a salt per tenant (`kv.hashing`), and one tenant's prompts never hit another's blocks. The salt is no
secret and need not be one: it is made from the tenant whose key was shown, and what a client chooses itself is only
hashed in beneath that. Nothing that a client can send makes the salt of somebody else, and no client ever names a
block. It is the same in every gateway, so that they share what a tenant has cached.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Request

_SALT_BYTES = 16


def apply_tenant_policy(request: Request, tenant: Tenant) -> Request:
    """The request as this tenant may have it: in its lane, and within its own part of the prefix caches. Raises
    INVALID_REQUEST for a prompt that is too long.

    A better lane than its own becomes its own, as OpenAI's service tiers do; the answer says which it was.
    """
    num_tokens = len(request.prompt_tokens)
    if 0 < tenant.max_prompt_tokens < num_tokens:
        message = f"prompts may have at most {tenant.max_prompt_tokens} tokens, and this one has {num_tokens}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason="max_prompt_tokens")
    salt = cache_salt(tenant, request.cache_salt)
    return replace(request, tenant=tenant.id, lane=max(request.lane, tenant.lane), cache_salt=salt)


def cache_salt(tenant: Tenant, chosen: str = "") -> str:
    """What the names of its blocks begin with. `chosen`, by the client, parts its own prefixes further; nothing is
    without a salt but what is public and not parted."""
    is_public = tenant.cache_sharing == "public"
    if is_public and not chosen:
        return ""
    owner = "public" if is_public else f"tenant {tenant.id}"
    # The length keeps an owner and a choice from being read as another owner and another choice.
    text = f"{len(owner)} {owner} {chosen}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_SALT_BYTES).hexdigest()
