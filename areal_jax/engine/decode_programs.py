"""The decode programs, compiled ahead of their first call and kept by verb and shape.

A call with other shapes is an error, not a silent compilation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from areal_jax.engine.batch import SamplingMode
from areal_jax.engine.decode_shapes import DecodeShapes
from areal_jax.engine.decode_state import DecodeState, EngineParams, read_field
from areal_jax.engine.decode_step import generate
from areal_jax.engine.decode_view import insert_pages, resize
from areal_jax.engine.drafted_step import generate_drafted
from areal_jax.engine.drafts import record_sequences
from areal_jax.engine.prefill import (
    copy_pages,
    copy_states,
    encode,
    extend,
    prefill,
    with_draft,
)
from areal_jax.engine.scoring import Scores, score
from areal_jax.models.adapted import AdapterStack, assign_rows
from areal_jax.parallel.compilation import Compiler, compile_lowered
from areal_jax.parallel.sharding import on_shards, shardings_of


class DecodePrograms:
    """Compiled programs of one engine.

    Attributes:
        compiled: Programs by verb and shape.
        compile_s: Time spent on compiling so far, in seconds.
    """

    def __init__(self, shapes: DecodeShapes, compiler: Compiler = compile_lowered):
        """
        Args:
            shapes: Policy, mesh and sizes.
            compiler: Compiles a program.
        """
        self._shapes, self._compiler = shapes, compiler
        self.compiled: dict[tuple[str | int, ...], jax.stages.Compiled] = {}
        self.compile_s = 0.0

    def get(self, verb: str, *shape: int) -> jax.stages.Compiled:
        """Return a program; compile it first if this is its first use."""
        key = (verb, *shape)
        if key not in self.compiled:
            start_s = time.perf_counter()
            self.compiled[key] = self._compiler(self.lower(verb, *shape), self._shapes.mesh)
            self.compile_s += time.perf_counter() - start_s
        return self.compiled[key]

    def lower(self, verb: str, *shape: int) -> jax.stages.Lowered:
        """Lower a program.

        The function has more than 60 lines because it lists the arguments of every program.

        Args:
            verb: `init`, `generate`, `generate_masked`, `prefill`, `extend`, `prefill_images`,
                `extend_images`, `encode`, `copy`, `copy_states`, `record`, `insert`, `resize`,
                `lay_out_draft`, `score`, `same_weights`, `same_adapters` or `same_tower`.
            shape: View length and mode of `generate` and `generate_masked`; rows and tokens of
                `prefill` and `extend`; patches of `encode`; tokens and view length of `insert`;
                both lengths of `resize`; tokens of `score`.

        Raises:
            ValueError: There is no such program.
        """
        shapes = self._shapes
        pages, table = shapes.pages(), shapes.table()
        match verb, *shape:
            case ("init",):
                view = shapes.view(shapes.view_lengths[0] if shapes.view_lengths else 0)
                zeros = pages, view, shapes.recurrent(), shapes.drafts()
                return _lower(
                    lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), zeros), (), zeros
                )
            case ("generate" | "generate_masked") as verb, length, mode:
                masked = verb == "generate_masked"
                return self._lower_generate(length, SamplingMode(mode), masked=masked)
            case ("prefill" | "extend" | "prefill_images" | "extend_images") as verb, rows, length:
                arguments = self._prefill_arguments(rows, length)
                if verb.endswith("_images"):
                    arguments += shapes.images(rows, length)
                plain = prefill if verb.startswith("prefill") else extend
                run = partial(with_draft, plain, shapes)
                if shapes.num_adapters:
                    run = partial(_run_with_adapters, run)
                experts = None
                if shapes.config.router_replay:
                    size = shapes.experts(rows, length)
                    experts = shapes.array(size, shapes.experts_dtype, "batch")
                kept = pages, shapes.recurrent()
                arguments = shapes.params, kept, *arguments
                return _lower(run, arguments, (kept, experts), donate=1)
            case ("copy",):
                return self._lower_on_shards(copy_pages, (pages, *shapes.shard_lists(2)), pages)
            case ("copy_states",):
                states = shapes.recurrent()
                arguments = states, *shapes.shard_lists(2)
                return self._lower_on_shards(copy_states, arguments, states)
            case "insert", tokens, length:
                view = shapes.view(length)
                insert = partial(
                    insert_pages,
                    num_pages=math.ceil(tokens / shapes.config.page_tokens),
                    first=shapes.config.tokens_per_dispatch,
                )
                arguments = view, pages, table, *shapes.shard_lists(1)
                return self._lower_on_shards(insert, arguments, view)
            case "resize", length, wanted:
                after = shapes.view(wanted)
                return _lower(
                    lambda view: jax.tree.map(resize, view, after), (shapes.view(length),), after
                )
            case ("record",):
                drafts = shapes.drafts()
                arguments = drafts, *shapes.recorded()
                return _lower(record_sequences, arguments, drafts, donate=0)
            case ("lay_out_draft",):
                draft = shapes.draft
                assert draft is not None
                return _lower(draft.layout, (draft.loaded(),), draft.params)
            case "encode", patches:
                vision = shapes.policy.config.vision
                assert vision is not None
                inputs = (
                    shapes.array((1, patches, vision.patch_width), jnp.float32),
                    shapes.array((1, patches, 5), jnp.int32),
                )
                tokens = patches // vision.merged_patches
                return _lower(
                    partial(encode, shapes), (shapes.params, *inputs), shapes.features(1, tokens)
                )
            case "score", length:
                rows = shapes.num_shards
                tokens = shapes.array((rows, length), jnp.int32, "batch")
                counts = shapes.array((rows,), jnp.int32, "batch")
                columns = shapes.array((rows, length), jnp.float32, "batch")
                return _lower(
                    partial(score, shapes),
                    (shapes.params, tokens, counts),
                    Scores(columns, columns, columns),
                )
            case ("same_tower",):
                tower = shapes.params["vision"]
                return _lower(_equal_bits, (tower, tower), shapes.array((), jnp.int32))
            case ("same_adapters",):
                flags = shapes.array((shapes.num_adapters,), jnp.bool_)
                return _lower(_equal_adapters, (shapes.params, shapes.params), flags)
            case ("same_weights",):
                scalar = shapes.array((), jnp.int32)
                return _lower(_equal_bits, (shapes.params, shapes.params), scalar)
            case _:
                raise ValueError(f"the engine has no program for {verb!r}")

    def _lower_generate(
        self, length: int, mode: SamplingMode, *, masked: bool
    ) -> jax.stages.Lowered:
        shapes, num_slots = self._shapes, self._shapes.config.num_slots
        packed = shapes.array((1, num_slots), jnp.int32, None, "slots")
        state, sequences = shapes.state(length), None
        sample = generate_drafted if shapes.config.draft_tokens else generate
        if mode == SamplingMode.SHAPED:
            sequences = shapes.array((num_slots, shapes.config.max_tokens), jnp.int32, "slots")
        arguments = shapes.params, state, sequences, shapes.masks() if masked else None

        def run(params: EngineParams, state: DecodeState, *more: Any) -> Any:
            adapters, active = (read_field(state.slots, each) for each in ("adapter", "active"))
            own = assign_rows(params, adapters, active > 0)
            return sample(shapes, mode, own, state, *more)

        plain = partial(sample, shapes, mode)
        function = run if shapes.num_adapters else plain
        return _lower(function, arguments, (state, packed), donate=1)

    def _prefill_arguments(self, rows: int, length: int) -> tuple[Any, ...]:
        shapes = self._shapes
        tokens = shapes.array((rows, length), jnp.int32, "batch")
        table = shapes.array((rows, shapes.pages_per_slot), jnp.int32, "batch")
        span = shapes.array((rows,), jnp.int32, "batch")
        return tokens, table, *[span] * (4 if shapes.num_adapters else 3)

    def _lower_on_shards(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], result: Any
    ) -> jax.stages.Lowered:
        """Lower what each device does with its own part; the first argument is donated."""
        ins, out = (
            jax.tree.map(lambda leaf: leaf.sharding.spec, each) for each in (arguments, result)
        )
        return _lower(on_shards(function, self._shapes.mesh, ins, out), arguments, result, donate=0)


def _run_with_adapters(
    run: Callable[..., Any], params: EngineParams, kept: Any, *batch: Array
) -> Any:
    """Prefill rows whose adapters are the sixth array of the batch, after the slots."""
    own, counts, adapters = (*batch[:5], *batch[6:]), batch[3], batch[5]
    return run(assign_rows(params, adapters, counts > 0), kept, *own)


def _equal_bits(old: EngineParams, new: EngineParams) -> Bool[Array, ""]:
    equal = jax.tree.map(lambda a, b: _same_bits(a, b).all(), old, new)
    return jnp.stack(jax.tree.leaves(equal)).all()


def _equal_adapters(old: EngineParams, new: EngineParams) -> Bool[Array, "_"]:
    """Compare each adapter; the base is frozen."""

    def equal(old: Any, new: Any) -> Any:
        if not isinstance(old, AdapterStack):
            return None
        pairs = ((old.a, new.a), (old.b, new.b), (old.scale, new.scale))
        same = [_same_bits(*pair).reshape(len(pair[0]), -1).all(1) for pair in pairs]
        return jnp.stack(same).all(0)

    found = jax.tree.map(equal, old, new, is_leaf=lambda node: isinstance(node, AdapterStack))
    return jnp.stack(jax.tree.leaves(found)).all(0)


def _same_bits(a: Array, b: Array) -> Bool[Array, "..."]:
    # As integers: nan equals itself, and -0 is not 0.
    bits = jnp.dtype(f"uint{8 * a.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(a, bits) == jax.lax.bitcast_convert_type(b, bits)


def _lower(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    result: Any,
    *,
    donate: int | None = None,
) -> jax.stages.Lowered:
    """Lower a function; its results have the shardings of `result`."""
    donated = () if donate is None else (donate,)
    return jax.jit(function, out_shardings=shardings_of(result), donate_argnums=donated).lower(
        *arguments
    )
