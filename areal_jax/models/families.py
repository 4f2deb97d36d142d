"""Model families outside the package."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from areal_jax.models.config_keys import FAMILY_KEYS
from areal_jax.models.traits import TRAITS


def register_model_family(
    architecture: str,
    *,
    like: str,
    model_type: str,
    tensor_names: Mapping[str, str] = MappingProxyType({}),
    harmless_keys: Collection[str] = (),
    **traits: Any,
) -> None:
    """Register a family of decoders whose layers are those of a known family, with other traits.

    Call it before a policy of the family is loaded: in the experiment's file, which every process
    of a run imports. What is read, trained, served and written follows the registration.

    Args:
        architecture: as config.json names it in `architectures`, ending in ForCausalLM.
        like: known family with the same layers, such as LlamaForCausalLM.
        model_type: as in config.json.
        tensor_names: names of tensors in the files, by Llama's names, with {} for the layer:
            `{"model.layers.{}.self_attn.q_proj.weight": "blocks.{}.wq.weight"}`; others are the
            same.
        harmless_keys: keys of config.json, beyond those of `like`, without effect on the policy.
        traits: fields of `areal_jax.models.traits.Traits` that differ from those of `like`,
            such as qk_norm=True.

    Raises:
        ValueError: `like` is unknown, another family has the name, or a name or trait is invalid.
    """
    if like not in TRAITS:
        raise ValueError(f"like={like}: expected one of {', '.join(TRAITS)}")
    if not architecture.endswith("ForCausalLM"):
        raise ValueError(f"expected an architecture that ends in ForCausalLM, found {architecture}")
    if unknown := set(traits) - set(TRAITS[like]._fields):
        raise ValueError(f"expected traits of {', '.join(TRAITS[like]._fields)}, found {unknown}")
    if wrong := [
        f"{name}: {given}"
        for name, given in tensor_names.items()
        if name.count("{}") != given.count("{}")
    ]:
        raise ValueError(f"tensor_names: expected as many {{}} in both names, found {wrong}")
    made = TRAITS[like]._replace(model_type=model_type, tensor_names=dict(tensor_names), **traits)
    if TRAITS.get(architecture, made) != made:
        raise ValueError(f"{architecture} is already registered, with other traits")
    TRAITS[architecture] = made
    FAMILY_KEYS[architecture] = {**FAMILY_KEYS[like], **dict.fromkeys(harmless_keys, "harmless")}
