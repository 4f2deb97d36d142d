"""Tenants of a server: their keys, what each owns, and what each may use at the same time.

A tenant owns its sessions, and with them models, samplers, requests and checkpoints, whose ids all
start with that of the session. Others do not see them.
"""

from __future__ import annotations

import hmac
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import chz

from areal_jax.errors import ConfigError, InvalidRequest
from areal_jax.serve.validation import APIError
from areal_jax.tinker.config import KEY_PREFIX, TenantQuota

DEFAULT = "default"
"""Tenant of the server's own key."""

SCHEME = "tinker://"

QUOTAS = tuple(chz.asdict(TenantQuota()))


class Unknown(InvalidRequest):
    """Something that a client names does not exist, or no longer."""


class QueueFull(APIError):
    """A request beyond a limit, which is accepted later."""

    def __init__(self, limit: str, most: int, found: int) -> None:
        """
        Args:
            limit: name of the setting.
            most: its value.
            found: what there is of the same tenant.
        """
        super().__init__(429, f"{limit}={most} is reached; try again later")
        self.state = {
            "queue_state": "paused_rate_limit",
            "limit": limit.rpartition(".")[2],
            "most": most,
            "found": found,
        }


class Tenant(NamedTuple):
    """A tenant."""

    name: str
    api_key: str
    quota: TenantQuota


def read_tenants(path: str, quota: TenantQuota) -> tuple[Tenant, ...]:
    """Read tenants from a TOML file: a table for each, with `api_key` and quotas.

    Args:
        path: the file.
        quota: what tenants may use whose table does not say it.

    Raises:
        ConfigError: the file is missing or is no such file.
    """
    try:
        tables = tomllib.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"tenants={path}: cannot read it ({error})") from error
    tenants = tuple(_tenant(path, name, table, quota) for name, table in tables.items())
    if not tenants:
        raise ConfigError(f"tenants={path}: expected a table for each tenant, found none")
    if len({each.api_key for each in tenants}) < len(tenants):
        raise ConfigError(f"tenants={path}: expected a different api_key of each tenant")
    return tenants


def _tenant(path: str, name: str, table: Any, quota: TenantQuota) -> Tenant:
    where = f"tenants={path}: {name}"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: expected a table with api_key, found a {type(table).__name__}")
    given = dict(table)
    api_key = given.pop("api_key", None)
    if not isinstance(api_key, str) or not api_key.startswith(KEY_PREFIX):
        raise ConfigError(f"{where}.api_key: expected a text that starts with {KEY_PREFIX}")
    for field, value in given.items():
        if field not in QUOTAS:
            raise ConfigError(f"{where}.{field}: expected one of api_key, {', '.join(QUOTAS)}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{where}.{field}: expected an integer above 0, found {value!r}")
    return Tenant(name, api_key, chz.replace(quota, **given))


def session_of(name: str) -> str:
    """Return the session of a model, a sampler, a request or a tinker:// path."""
    return name.removeprefix(SCHEME).partition(":")[0]


class Tenants:
    """Who owns which session, and what is unfinished of each tenant. Used by the event loop only.

    Attributes:
        num_requests: Unfinished requests by tenant.
        num_tokens: Tokens of unfinished requests by tenant.
    """

    def __init__(
        self, tenants: Iterable[Tenant], sessions: Iterable[tuple[str, Mapping[str, Any], bool]]
    ) -> None:
        """
        Args:
            tenants: all tenants.
            sessions: stored sessions, with their fields, also those that have ended.
        """
        self._tenants = {each.name: each for each in tenants}
        self._owners = {name: fields.get("tenant", DEFAULT) for name, fields, _ in sessions}
        self._unfinished: dict[str, tuple[str, int]] = {}
        self.num_requests, self.num_tokens = Counter[str](), Counter[str]()

    def of_key(self, api_key: str) -> Tenant:
        """Return the tenant of a key.

        Raises:
            APIError: there is none.
        """
        # Every key is compared, each in constant time, which reveals nothing about any of them.
        shown = api_key.encode(errors="surrogateescape")
        found = [
            each
            for each in self._tenants.values()
            if hmac.compare_digest(shown, each.api_key.encode())
        ]
        if not found:
            raise APIError(401, "Incorrect API key provided: expected the server's key")
        return found[0]

    def add_session(self, session: str, tenant: Tenant) -> None:
        self._owners[session] = tenant.name

    def name_of(self, name: str) -> str:
        """Return the name of the tenant that owns something by its id or path."""
        return self._owners.get(session_of(name), DEFAULT)

    def require_owner(self, tenant: Tenant, name: str) -> None:
        """Check that a tenant owns something, unless it does not exist.

        Raises:
            Unknown: another one does, which is not revealed.
        """
        if self._owners.get(session_of(name), tenant.name) != tenant.name:
            raise Unknown(f"{name[:200]!r}: there is no such session, model or checkpoint")

    def check(self, tenant: str, quota: str, found: int, more: int = 1) -> None:
        """Check that a tenant may use more of something.

        Args:
            tenant: its name.
            quota: field of `TenantQuota`.
            found: what it uses.
            more: what would be added.

        Raises:
            QueueFull: not now.
            InvalidRequest: never.
        """
        most = getattr(self._tenants[tenant].quota, quota)
        if more > most:
            raise InvalidRequest(
                f"expected at most quota.{quota}={most}, found {more} in one request"
            )
        if found + more > most:
            raise QueueFull(f"quota.{quota}", most, found)

    def admit(self, request: str, num_tokens: int, *, is_awaited: bool) -> None:
        """Check that a request of so many tokens may wait beside the unfinished ones; if others
        wait for it, it may.
        """
        tenant = self.name_of(request)
        found = 0 if is_awaited else self.num_tokens[tenant]
        self.check(tenant, "max_tokens", found, num_tokens)
        if not is_awaited:
            self.check(tenant, "max_requests", self.num_requests[tenant])

    def begin(self, request: str, num_tokens: int) -> None:
        """Count an unfinished request."""
        tenant = self.name_of(request)
        self._unfinished[request] = tenant, num_tokens
        self.num_requests[tenant] += 1
        self.num_tokens[tenant] += num_tokens

    def end(self, request: str) -> None:
        """Count a request no more."""
        if (found := self._unfinished.pop(request, None)) is not None:
            tenant, num_tokens = found
            self.num_requests[tenant] -= 1
            self.num_tokens[tenant] -= num_tokens
