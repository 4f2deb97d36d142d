"""Keys, quotas and ownership of tenants."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_jax.errors import ConfigError, InvalidRequest
from areal_jax.serve.validation import APIError
from areal_jax.tinker.config import TenantQuota
from areal_jax.tinker.tenants import QueueFull, Tenant, Tenants, Unknown, read_tenants

QUOTA = TenantQuota(max_requests=2, max_tokens=100)


def tenants() -> Tenants:
    both = Tenant("a", "tml-a", QUOTA), Tenant("b", "tml-b", QUOTA)
    return Tenants(both, [("s1", {"tenant": "a"}, True), ("s2", {"tenant": "b"}, False)])


def test_a_key_names_its_tenant() -> None:
    found = tenants()
    assert [found.of_key(key).name for key in ("tml-a", "tml-b")] == ["a", "b"]
    for key in ("", "tml-c", "tml-", "\udce9"):
        with pytest.raises(APIError) as refused:
            found.of_key(key)
        assert refused.value.status == 401


@pytest.mark.parametrize(
    "name", ["s1", "s1:train:0", "s1:sample:3:7", "tinker://s1:train:0/weights/x"]
)
def test_what_others_own_is_unknown(name: str) -> None:
    found = tenants()
    found.require_owner(found.of_key("tml-a"), name)
    with pytest.raises(Unknown):
        found.require_owner(found.of_key("tml-b"), name)


def test_unfinished_requests_and_tokens_are_bounded() -> None:
    found = tenants()

    def submit(request: str, num_tokens: int, *, is_awaited: bool = False) -> None:
        found.admit(request, num_tokens, is_awaited=is_awaited)
        found.begin(request, num_tokens)

    submit("s1:train:0:1", 60)
    with pytest.raises(QueueFull) as refused:
        submit("s1:train:0:2", 41)
    assert refused.value.status == 429
    assert refused.value.state["limit"] == "max_tokens"
    assert (refused.value.state["most"], refused.value.state["found"]) == (100, 60)
    submit("s1:train:0:2", 40)
    with pytest.raises(QueueFull, match=r"quota\.max_requests=2 is reached"):
        submit("s1:train:0:3", 0)
    # The one that others wait for, and another tenant's.
    submit("s1:train:0:0", 50, is_awaited=True)
    submit("s2:sample:0:0", 100)
    for request in ("s1:train:0:0", "s1:train:0:1", "s1:train:0:1"):
        found.end(request)
    assert (found.num_requests["a"], found.num_tokens["a"]) == (1, 40)
    # What never fits is not tried again.
    for is_awaited in (False, True):
        with pytest.raises(InvalidRequest, match=r"quota\.max_tokens=100, found 101"):
            submit("s1:train:0:4", 101, is_awaited=is_awaited)


def test_tenants_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text('[lab]\napi_key = "tml-1"\nmax_tokens = 7\n[guest]\napi_key = "tml-2"\n')
    lab, guest = read_tenants(str(path), QUOTA)
    assert (lab.name, lab.api_key, lab.quota.max_tokens, lab.quota.max_requests) == (
        *("lab", "tml-1", 7, 2),
    )
    assert guest.quota == QUOTA
    for text, message in (
        ("", "found none"),
        ("x = 1", "expected a table"),
        ("[a]", "a.api_key: expected a text that starts with tml-"),
        ('[a]\napi_key = "tml-1"\n[b]\napi_key = "tml-1"', "a different api_key"),
        ('[a]\napi_key = "tml-1"\nmax_gpus = 1', "a.max_gpus: expected one of"),
        ('[a]\napi_key = "tml-1"\nmax_tokens = 0', "above 0, found 0"),
        ("[a", "cannot read it"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_tenants(str(path), QUOTA)
    with pytest.raises(ConfigError, match="cannot read it"):
        read_tenants(str(tmp_path / "none"), QUOTA)
