"""Define a tenant's limits and rights, and apply them to a request: prompt length, lane and cache salt. Other modules
check quotas and models.

Response times reveal which prompts are in a shared prefix cache. So block hashes begin with a salt per tenant
(`kv.hashing`), and one tenant's prompts never hit another's blocks. The salt is not secret and need not be: it derives
from the tenant whose API key was sent, and the part that a client chooses is only hashed into it. No client input
yields the salt of another tenant, and clients cannot name blocks directly. The salt is the same in every gateway, so
that gateways share a tenant's cached prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from tandem.admission.quota import QuotaLimits
from tandem.core.config import Disaggregation
from tandem.core.errors import ErrorKind, TandemError
from tandem.core.ids import OPEN_TENANT, TenantId
from tandem.core.lane import Lane
from tandem.core.request import Request

_SALT_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant and what it may use; a limit of 0 means that there is none.

    `models`: the models it may use; None allows all. Token limits count prompt tokens that were not in the prefix
    cache, and all output. `max_retained_tokens`: the most tokens that its requests may keep in the prefix cache of each
    worker by `cache_control`. `lane`: the most urgent lane that it may request, and the default of its requests.
    `weight`: its share of a lane relative to the weights of other tenants. `cache_sharing`: "public" lets all public
    tenants share cached prefixes. `disaggregation`: None uses the gateway's setting; a request may choose another, see
    `choosing`. `operator`: it may see the requests of other tenants in the console. `proxy`: it authenticates clients
    itself, and its requests name the tenant that they are for.
    """

    id: TenantId
    models: frozenset[str] | None = None
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    max_concurrency: int = 0
    max_prompt_tokens: int = 0
    max_retained_tokens: int = 0
    lane: Lane = Lane.INTERACTIVE
    weight: float = 1.0
    cache_sharing: Literal["private", "public"] = "private"
    disaggregation: Disaggregation | None = None
    operator: bool = False
    proxy: bool = False

    @property
    def limits(self) -> QuotaLimits:
        return QuotaLimits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrency)

    def choosing(self, requested: Disaggregation | None, of_gateway: Disaggregation) -> Tenant:
        """Return the tenant with the disaggregation that a request has chosen.

        `requested`: the choice; None: the request chooses nothing, and the tenant is returned as it is. `of_gateway`:
        the gateway's setting, which is the policy of tenants without a setting of their own. Raises
        TandemError(INVALID_REQUEST) when the policy is `off` or `strict` and the request chooses another, because the
        operator has decided then."""
        policy = self.disaggregation or of_gateway
        if requested is None or requested == policy:
            return self
        if policy in ("off", "strict"):
            message = f"disaggregation={requested} is not allowed: the policy of this tenant is {policy}"
            raise TandemError(ErrorKind.INVALID_REQUEST, message, param="disaggregation")
        return replace(self, disaggregation=requested)

    def may_use(self, *names: str) -> bool:
        """Return whether the tenant may use a model, of which `names` are all the names that clients may use.

        Callers report a forbidden model as not found: another error would reveal that the model exists.
        """
        return self.models is None or not self.models.isdisjoint(names)


OPEN = Tenant(id=OPEN_TENANT, cache_sharing="public", operator=True)
"""The tenant of all requests where no API key is required."""


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
