"""Settings that have another name since an earlier release, refused with their new name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

KEYS = {"trainer.loss.correction": "trainer.loss.importance_weighting"}
"""New key by old key, renamed in 0.2.0; settings inside a renamed one are renamed with it."""

CHOICES = {"trainer.loss.importance_weighting": {"NoCorrection": "Unweighted"}}
"""New class by old class, by the new key, renamed in 0.2.0."""


def find_renamed(given: Mapping[str, Any]) -> Iterator[str]:
    """Find old names among given settings, each as a sentence with the new name."""
    for key, value in given.items():
        old = next((old for old in KEYS if key == old or key.startswith(f"{old}.")), "")
        new_key = KEYS[old] + key.removeprefix(old) if old else key
        new_value = CHOICES.get(new_key, {}).get(str(value), value)
        if (new_key, new_value) != (key, value):
            yield f"{key}={value}: renamed in 0.2.0; set {new_key}={new_value}"
