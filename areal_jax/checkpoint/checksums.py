"""Checksums of a checkpoint that `store.CheckpointStore` saves or restores: they tell damage from
other causes of a failed restore.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from areal_jax.checkpoint.folders import FILES, find_checkpoints


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message has path, cause and remedy."""


def _checksums(checkpoint: Path) -> dict[str, list[int]]:
    """Compute size and CRC-32 of every file of a checkpoint, by relative path."""
    sums: dict[str, list[int]] = {}
    for path in sorted(
        path for path in checkpoint.rglob("*") if path.is_file() and path.name != FILES
    ):
        crc = 0
        with path.open("rb") as file:
            while block := file.read(1 << 24):
                crc = zlib.crc32(block, crc)
        sums[path.relative_to(checkpoint).as_posix()] = [path.stat().st_size, crc]
    return sums


def write_checksums(checkpoint: Path) -> None:
    text, unfinished = json.dumps(_checksums(checkpoint), indent=1), checkpoint / f"{FILES}.writing"
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        # Otherwise an empty file may have the new name after a crash of the machine.
        os.fsync(file.fileno())
    unfinished.replace(checkpoint / FILES)


def verify(checkpoint: Path) -> bool:
    """Compare all files with their checksums, because damaged weights would train silently.

    Returns:
        False if there is no files.json to compare with (a run was killed between the commit of the
        checkpoint and the write of files.json), else True.

    Raises:
        CheckpointError: a file differs from its checksum.
    """
    if not (checkpoint / FILES).is_file():
        return False
    try:
        expected: dict[str, list[int]] = json.loads((checkpoint / FILES).read_bytes())
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint / FILES} cannot be read ({error}), so the checkpoint cannot be verified. "
            "Delete this file alone to resume from the checkpoint nevertheless"
        ) from error
    found = _checksums(checkpoint)
    for name, (num_bytes, crc) in expected.items():
        if name not in found:
            raise CheckpointError(
                describe_damage(checkpoint, f"expected {name} of {num_bytes:,} bytes, found none")
            )
        if found[name] != [num_bytes, crc]:
            actual = f"{found[name][0]:,} bytes with CRC-32 {found[name][1]:08x}"
            raise CheckpointError(
                describe_damage(
                    checkpoint,
                    f"{name}: expected {num_bytes:,} bytes with CRC-32 {crc:08x}, found {actual}",
                )
            )
    return True


def describe_damage(checkpoint: Path, cause: str) -> str:
    others = [
        path.name
        for _, path in sorted(find_checkpoints(checkpoint.parent).items())
        if path != checkpoint
    ]
    remedy = (
        f"to resume from another checkpoint ({', '.join(others)})"
        if others
        else "and start again, since there is no other checkpoint"
    )
    return (
        f"checkpoint {checkpoint} cannot be read: "
        f"{cause.splitlines()[0] if cause else 'unknown cause'}. Delete this folder {remedy}"
    )


def first_line(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0].removesuffix(".")
