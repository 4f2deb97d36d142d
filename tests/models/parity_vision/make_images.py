"""Make the fixtures of image preprocessing: hashes of the patches that transformers computes.

Needs torch, which areal_jax itself does not:

    pip install torch==2.13.0 transformers==5.23.0 pillow==12.3.0
    python tests/models/parity_vision/make_images.py
    pip install pillow==13.0.0
    python tests/models/parity_vision/make_images.py

images.json has a record per image: seed, mode and size for `sample_image`, the settings of the
processor, and from transformers' Qwen2VLImageProcessorPil the grid, and the SHA-256 of the patches.
Pillow 13 shrinks some images differently, so it has hashes of its own.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import PIL
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

sys.path.insert(0, str(Path(__file__).parent.parent / "vision"))
from sampled_images import MODES, sample_image

PROCESSORS = {
    "qwen2_vl": {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14},
    "qwen2_5_vl_small": {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 16, "patch_size": 14},
    "qwen3_vl": {
        "size": {"shortest_edge": 65536, "longest_edge": 16777216},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
}


def main() -> None:
    records, draw = [], random.Random(0)
    file = Path(__file__).parent / "images.json"
    before = json.loads(file.read_text()) if file.exists() else [{}] * 48
    pillow = "13" if int(PIL.__version__.split(".")[0]) >= 13 else "11"
    for seed, known in enumerate(before):
        name = draw.choice(sorted(PROCESSORS))
        mode = draw.choice(MODES)
        height, width = (round(2 ** draw.uniform(3, 9)) for _ in range(2))
        settings = {"temporal_patch_size": 2, "merge_size": 2, **PROCESSORS[name]}
        out = Qwen2VLImageProcessorPil(**settings)(
            [sample_image(seed, mode, height, width)], return_tensors="np"
        )
        records.append(
            {
                "seed": seed,
                "mode": mode,
                "size": [height, width],
                "settings": settings,
                "grid": out["image_grid_thw"][0].tolist(),
                "sha256": known.get("sha256", {})
                | {pillow: hashlib.sha256(out["pixel_values"].tobytes()).hexdigest()},
            }
        )
        assert out["pixel_values"].dtype == "float32"
    lines = ",\n".join(json.dumps(record) for record in records)
    file.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
