"""The Tinker-compatible training server: settings, key and address."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from areal_jax.cluster.environment import prepare
from areal_jax.config.overrides import (
    assign,
    build,
    flattened,
    from_object,
    from_text,
    parse_overrides,
    settings,
)
from areal_jax.errors import ConfigError
from areal_jax.parallel.config import PlacementConfig
from areal_jax.tinker.config import KEY_PREFIX, TinkerConfig


class ListeningServer(NamedTuple):
    """A training server that answers."""

    model: str
    """Name of the policy for clients."""
    base_url: str
    api_key: str | None
    """Key of the default tenant; None: only the tenants of the file have keys."""


def read_config(
    overrides: Sequence[str], changes: Mapping[str, Any] = MappingProxyType({})
) -> TinkerConfig:
    """Read settings from `a.b=c` overrides, and from Python values by dotted key.

    Raises:
        ConfigError: a setting is unknown, of another type, or out of bounds.
    """
    listed = assign(parse_overrides(overrides), settings(TinkerConfig), from_text)
    config = build(TinkerConfig, assign(flattened(changes, listed), listed, from_object))
    if config.api_key is not None and not config.api_key.startswith(KEY_PREFIX):
        raise ConfigError(
            f"api_key: expected a key that starts with {KEY_PREFIX}, as the client requires"
        )
    return config


@asynccontextmanager
async def listening_server(config: TinkerConfig) -> AsyncIterator[ListeningServer]:
    """Load the policy, resume from the run folder, and answer requests until the block ends.

    Raises:
        ConfigError: the policy is missing or does not fit, the run folder or the port is in use.
    """
    # jax reads its flags when it is first imported: imports of jax come after this.
    prepare(PlacementConfig(simulated_devices=config.simulated_devices))
    from areal_jax.run.training_service import training_service
    from areal_jax.serve.app import listening
    from areal_jax.tinker.app import App
    from areal_jax.tinker.journal import Journal
    from areal_jax.tinker.tenants import DEFAULT, Tenant, Tenants, read_tenants

    journal = Journal(Path(config.run_folder).expanduser())
    try:
        # A client that goes on after a restart has the old key.
        generated = KEY_PREFIX + secrets.token_urlsafe(24)
        own = () if config.tenants is None else read_tenants(config.tenants, config.quota)
        api_key = config.api_key
        if not own and api_key is None:
            api_key = journal.value("api_key", generated)
        if api_key is not None:
            own = Tenant(DEFAULT, api_key, config.quota), *own
        tenants = Tenants(own, journal.sessions())
        async with training_service(config, journal, tenants) as service:
            app = App(service)
            try:
                async with listening(
                    app, config.host, config.port, config.limits.shutdown_timeout_s
                ) as port:
                    base_url = f"http://{config.host}:{port}"
                    yield ListeningServer(service.policy.name, base_url, api_key)
            except OSError as error:
                raise ConfigError(
                    f"host={config.host} port={config.port}: cannot listen there "
                    f"({error.strerror or error})"
                ) from error
    finally:
        journal.close()
