"""Apply a tenant's limits to a request: prompt length, lane and cache salt. Other modules check quotas and models.

Response times reveal which prompts are in a shared prefix cache. So block hashes begin with a salt per tenant
(`kv.hashing`), and one tenant's prompts never hit another's blocks. The salt is not secret and need not be: it derives
from the tenant whose API key was sent, and the part that a client chooses is only hashed into it. No client input
yields the salt of another tenant, and clients cannot name blocks directly. The salt is the same in every gateway, so
that gateways share a tenant's cached prefixes.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from tandem.admission.tenant import Tenant
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.request import Request

_SALT_BYTES = 16


def apply_tenant_policy(request: Request, tenant: Tenant) -> Request:
    """Return a copy of the request with the tenant's id, cache salt and limit on retained tokens, and with a lane that
    the tenant may use.

    A lane more urgent than the tenant's is replaced by the tenant's, as OpenAI does with service tiers; the response
    contains the lane used. Raises TandemError(INVALID_REQUEST) for a prompt longer than the tenant's limit.
    """
    num_tokens = len(request.prompt_tokens)
    if 0 < tenant.max_prompt_tokens < num_tokens:
        message = f"the prompt has {num_tokens} tokens, and this key allows at most {tenant.max_prompt_tokens}"
        raise TandemError(ErrorKind.INVALID_REQUEST, message, param="prompt", reason="max_prompt_tokens")
    salt = cache_salt(tenant, request.cache_salt)
    return replace(
        request,
        tenant=tenant.id,
        lane=max(request.lane, tenant.lane),
        cache_salt=salt,
        max_retained_tokens=tenant.max_retained_tokens,
    )


def cache_salt(tenant: Tenant, chosen: str = "") -> str:
    """Return the salt for the block hashes of a tenant's request; only requests with equal salts share cached prefixes.

    `chosen`: a text from the client that separates its prefixes further. The salt is empty only for tenants with public
    prefixes, if the client chose nothing.
    """
    is_public = tenant.cache_sharing == "public"
    if is_public and not chosen:
        return ""
    owner = "public" if is_public else f"tenant {tenant.id}"
    # The length keeps the concatenation of owner and choice unambiguous.
    text = f"{len(owner)} {owner} {chosen}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_SALT_BYTES).hexdigest()
