"""Seeded pictures of shapes in nine cells, for exercises that a policy solves by looking."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from PIL import Image, ImageDraw

from areal_jax.image_files import ImageFile

CELL_PIXELS = 28
"""Side of a cell. With patches of 14 pixels, of which a token has two by two, a cell is a token."""

SIDE = 3
"""Cells along each side of a picture."""

COLORS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (200, 40, 40),
    "green": (40, 150, 60),
    "blue": (50, 80, 200),
}
FORMS = ("circle", "square", "triangle")


class Shape(NamedTuple):
    """A shape of a picture."""

    color: str
    form: str


Picture: TypeAlias = Sequence[Shape | None]
"""The shape of each cell, in reading order; None: an empty cell."""


def arrange_shapes(rng: random.Random, counted: Shape, most: int) -> Picture:
    """Fill a picture with 0 to `most` of one shape, all equally likely, and some others."""
    others = [
        shape for color in COLORS for form in FORMS if (shape := Shape(color, form)) != counted
    ]
    count = rng.randint(0, most)
    num_others = rng.randint(1, SIDE**2 - count)
    shapes: list[Shape | None] = [counted] * count
    shapes += [rng.choice(others) for _ in range(num_others)]
    shapes += [None] * (SIDE**2 - len(shapes))
    rng.shuffle(shapes)
    return shapes


def draw_picture(picture: Picture, rng: random.Random) -> ImageFile:
    """Draw a picture as PNG; sizes, places and shades of the shapes vary."""
    background = tuple(rng.randint(225, 255) for _ in range(3))
    image = Image.new("RGB", (SIDE * CELL_PIXELS, SIDE * CELL_PIXELS), background)
    canvas = ImageDraw.Draw(image)
    for place, shape in enumerate(picture):
        if shape is None:
            continue
        radius = rng.randint(8, 11)
        margin = CELL_PIXELS // 2 - radius
        row, column = divmod(place, SIDE)
        x, y = (
            each * CELL_PIXELS + CELL_PIXELS // 2 + rng.randint(-margin, margin)
            for each in (column, row)
        )
        color = tuple(part + rng.randint(-30, 30) for part in COLORS[shape.color])
        box = (x - radius, y - radius, x + radius, y + radius)
        match shape.form:
            case "circle":
                canvas.ellipse(box, fill=color)
            case "square":
                canvas.rectangle(box, fill=color)
            case _:
                canvas.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=color)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()
