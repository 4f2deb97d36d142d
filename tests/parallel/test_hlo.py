"""The reader of HLO text, on programs compiled for eight simulated devices and on stored text."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_jax.parallel.hlo import Collective, Program, mesh_axes

LAYERS, WIDTH, ROWS = 5, 64, 16


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))


def sharded(mesh: Mesh, shape: tuple[int, ...], *axes: object) -> jax.ShapeDtypeStruct:
    placed = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)


@pytest.fixture(scope="module")
def gradient(mesh: Mesh) -> Program:
    """Gradient of a scan over layers, with parameters sharded over fsdp and rows over both."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return (x * x).sum()

    w = sharded(mesh, (LAYERS, WIDTH, WIDTH), None, "fsdp")
    x = sharded(mesh, (ROWS, WIDTH), ("data", "fsdp"))
    compiled = jax.jit(jax.grad(loss), out_shardings=w.sharding).lower(w, x).compile()
    return Program(compiled.as_text() or "")


def test_products_in_a_loop_count_as_often_as_it_runs(gradient: Program) -> None:
    # One product forwards and two backwards in each layer, on an eighth of the rows.
    assert gradient.work().flops == LAYERS * 3 * 2 * (ROWS / 8) * WIDTH * WIDTH


def test_collectives_of_sharded_layers_are_found(gradient: Program, mesh: Mesh) -> None:
    whole = WIDTH * WIDTH * 4
    gathered = {
        (each.kind, each.num_bytes, mesh_axes(each.group, mesh.shape)): count
        for each, count in gradient.work().collectives.items()
    }
    # Parameters are gathered forwards and backwards.
    assert gathered["all-gather", whole, ("fsdp",)] == 2 * LAYERS
    reduced = sum(count for (kind, *_), count in gathered.items() if kind == "all-reduce")
    assert reduced == 2 * LAYERS


def test_unrolled_and_scanned_layers_have_equal_work(mesh: Mesh) -> None:
    def chain(w: jax.Array, x: jax.Array, unroll: bool) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w, unroll=unroll)[0]

    w, x = sharded(mesh, (LAYERS, WIDTH, WIDTH)), sharded(mesh, (ROWS, WIDTH), "data")
    works = [
        Program(
            jax.jit(chain, static_argnums=2).lower(w, x, unroll).compile().as_text() or ""
        ).work()
        for unroll in (False, True)
    ]
    assert works[0].flops == works[1].flops == LAYERS * 2 * (ROWS / 2) * WIDTH**2
    # In the loop one layer is cut out at a time (read, written and read), not all of them.
    for work in works:
        assert LAYERS * WIDTH**2 * 4 <= work.num_bytes <= 4 * LAYERS * WIDTH**2 * 4


STORED = """
HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %p = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,64]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %sum = f32[8,64]{1,0:T(8,128)S(1)} all-reduce(%x), channel_id=3, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) tuple(%next, %sum)
}

%condition (q: (s32[], f32[8,64])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  %bound = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[]{:T(512)} compare(%j, %bound), direction=LT
}

%all-reduce-scatter.1 (input: f32[64,32]) -> f32[16,32] {
  %input = f32[64,32]{1,0} parameter(0)
  %all-reduce.9 = f32[64,32]{1,0} all-reduce(%input), channel_id=9, replica_groups={{0,1,2,3}}, to_apply=%add
  %zero = u32[] constant(0)
  ROOT %mine = f32[16,32]{1,0} dynamic-slice(%all-reduce.9, %zero, %zero), dynamic_slice_sizes={16,32}
}

%start (part: bf16[16,32]) -> (bf16[16,32], bf16[64,32]) {
  %part = bf16[16,32]{1,0} parameter(0)
  %all-gather.1 = bf16[64,32]{1,0} all-gather(%part), channel_id=4, replica_groups=[1,4]<=[4], dimensions={0}, frontend_attributes={chain_id="3"}
  ROOT %begin = (bf16[16,32]{1,0}, bf16[64,32]{1,0}) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%finish (part.1: bf16[16,32]) -> bf16[64,32] {
  %part.1 = bf16[16,32]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[64,32]{1,0} all-gather(%part.1), channel_id=4, replica_groups=[1,4]<=[4], dimensions={0}, frontend_attributes={chain_id="3"}
}

ENTRY %main (a: f32[8,64], b: f32[64,32], c: bf16[16,32], d: bf16[2048,1536], e: bf16[2,128,1536]) -> f32[8,64] {
  %a = f32[8,64]{1,0} parameter(0)
  %b = f32[64,32]{1,0} parameter(1)
  %c = bf16[16,32]{1,0} parameter(2)
  %d = bf16[2048,1536,1]{1,0,2} parameter(3)
  %e = bf16[2,128,1536]{2,1,0} parameter(4)
  %zero.1 = s32[]{:T(128)} constant(2)
  %start.1 = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) tuple(%zero.1, %a)
  %loop = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) while(%start.1), condition=%condition, body=%body
  %scattered = f32[16,32]{1,0} fusion(%b), kind=kCustom, calls=%all-reduce-scatter.1
  %gathering = (bf16[16,32]{1,0}, bf16[64,32]{1,0}) fusion(%c), kind=kCustom, calls=%start
  %gathered = bf16[64,32]{1,0} fusion(%c), kind=kCustom, calls=%finish
  %heads = bf16[2048,2,128]{2,0,1} convolution(%d, %e), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=bf0_0oi->b0f
  ROOT %result = f32[8,64]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_collectives_that_xla_tpu_fuses_are_counted_once() -> None:
    # The loop runs from 2 to 7; its first group is {0, 2}.
    assert Program(STORED).work().collectives == {
        Collective("all-reduce", 8 * 64 * 4, (0, 2), False): 5,
        Collective("reduce-scatter", 64 * 32 * 4, (0, 1, 2, 3), False): 1,
        Collective("all-gather", 64 * 32 * 2, (0, 1, 2, 3), True): 1,
    }


def test_products_in_the_form_of_convolutions_skip_padding() -> None:
    assert Program(STORED).work().flops == 2 * 2048 * 1536 * 2 * 128


def test_ring_traffic_of_each_kind() -> None:
    def sent(kind: str, group: tuple[int, ...]) -> float:
        return Collective(kind, 1000, group, False).sent_bytes(8)

    assert sent("all-gather", (0, 1, 2, 3)) == sent("reduce-scatter", (0, 1, 2, 3)) == 750
    assert sent("all-reduce", (0, 1, 2, 3)) == 1500
    assert sent("all-reduce", ()) == 1750
    assert sent("collective-permute", (0, 1)) == 1000


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("fsdp",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "fsdp")),
        ("mesh['a'=2,'b'=4] {'b'}", ("fsdp",)),
        ("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", ("data",)),
        ("mesh['a'=8] {'a':(1)2}", ("data",)),
        ("mesh['a'=8] {'a':(2)4}", ("fsdp",)),
    ],
)
def test_groups_are_named_by_their_mesh_axes(groups: str, axes: tuple[str, ...]) -> None:
    text = STORED.replace("{{0,1,2,3}}", groups)
    (found,) = (each for each in Program(text).work().collectives if each.kind == "reduce-scatter")
    assert mesh_axes(found.group, {"data": 2, "fsdp": 4}) == axes


def test_loops_of_dynamic_length_are_reported_or_given() -> None:
    text = STORED.replace("%bound = s32[]{:T(128)} constant(7)", "%bound = s32[]{:T(128)} abs(%j)")
    reduces = Collective("all-reduce", 8 * 64 * 4, (0, 2), False)
    work = Program(text).work()
    assert (work.unknown_loops, work.collectives[reduces]) == (1, 1)
    work = Program(text).work(dynamic_trips=16)
    assert (work.unknown_loops, work.collectives[reduces]) == (0, 16)


SPARSE_CORE = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%scattering (whole: f32[64,32]) -> f32[16,32] {
  %whole = f32[64,32]{1,0} parameter(0)
  ROOT %scattered = f32[16,32]{1,0} reduce-scatter(%whole), replica_groups={{0,1,2,3}}, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (whole: f32[64,32]) -> f32[16,32] {
  %whole = f32[64,32]{1,0} parameter(0)
  %start = ((f32[64,32]{1,0}), f32[16,32]{1,0}, u32[]) call-start(%whole), async_execution_thread="sparsecore", to_apply=%scattering
  %meanwhile = f32[64,32]{1,0} add(%whole, %whole)
  ROOT %done = f32[16,32]{1,0} call-done(%start)
}
"""


def test_collectives_on_a_sparse_core_are_counted_and_overlap() -> None:
    def collectives(text: str) -> set[Collective]:
        return set(Program(text).work().collectives)

    assert collectives(SPARSE_CORE) == {
        Collective("reduce-scatter", 64 * 32 * 4, (0, 1, 2, 3), True)
    }
    alone = "\n".join(line for line in SPARSE_CORE.splitlines() if "meanwhile" not in line)
    assert collectives(alone) == {Collective("reduce-scatter", 64 * 32 * 4, (0, 1, 2, 3), False)}


def test_attributes_of_a_kernel_end_no_computation() -> None:
    kernel = (
        '  %kernel = f32[4]{0} custom-call(%whole), custom_call_target="tpu_custom_call", '
        "backend_config={{\n}}, metadata={}\n"
    )
    text = SPARSE_CORE.replace("  %start", f"{kernel}  %start")
    assert Program(text).work().collectives == Program(SPARSE_CORE).work().collectives


def test_text_without_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        Program("HloModule empty")


ASYNCHRONOUS_SLICE = """\
HloModule sliced, is_scheduled=true

%fused (stack: f32[28,64,32], at: s32[]) -> f32[1,64,32] {
  %stack = f32[28,64,32]{2,1,0} parameter(0)
  %at = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,64,32]{2,1,0} dynamic-slice(%stack, %at, %zero, %zero), dynamic_slice_sizes={1,64,32}
}

ENTRY %main (weights: f32[28,64,32], layer: s32[]) -> f32[1,64,32] {
  %weights = f32[28,64,32]{2,1,0} parameter(0)
  %layer = s32[] parameter(1)
  %begun = ((f32[28,64,32]{2,1,0}, s32[]), f32[1,64,32]{2,1,0}, u32[]) fusion-start(%weights, %layer), kind=kLoop, calls=%fused
  ROOT %ended = f32[1,64,32]{2,1,0} fusion-done(%begun)
}
"""


def test_slices_that_start_early_move_only_the_slice() -> None:
    slice_bytes, index_bytes = 64 * 32 * 4, 4
    assert Program(ASYNCHRONOUS_SLICE).work().num_bytes == 2 * slice_bytes + index_bytes


SLICES_AND_COPIES = """\
HloModule moved, is_scheduled=true, num_partitions=4

ENTRY %main (weights: s8[65536], part: f32[16]) -> f32[64] {
  %weights = s8[65536]{0:T(1024)} parameter(0)
  %part = f32[16]{0:T(128)} parameter(1)
  %gathers = (f32[16]{0:T(128)}, f32[64]{0:T(256)}) all-gather-start(%part), replica_groups={{0,1,2,3}}, dimensions={0}
  %begun = ((s8[65536]{0:T(1024)}), s8[4096]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-start(%weights), slice={[0:4096]}
  %goes_on = ((s8[65536]{0:T(1024)}), s8[4096]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-update(%begun)
  %ended = s8[4096]{0:T(1024)S(1)} slice-done(%goes_on)
  %read = s8[2048]{0:T(1024)S(1)} slice(%weights), slice={[0:2048]}
  ROOT %whole = f32[64]{0:T(256)} all-gather-done(%gathers)
}
"""


def test_slices_into_memory_on_the_chip_are_read_once() -> None:
    gathered = (16 + 64) * 4
    assert Program(SLICES_AND_COPIES).work().num_bytes == gathered + 4096 + 2048


def test_a_collective_overlaps_with_computation_but_not_with_copies() -> None:
    def overlaps(text: str) -> list[bool]:
        return [each.is_asynchronous for each in Program(text).work().collectives]

    copies_alone = SLICES_AND_COPIES.replace(
        "  %read = s8[2048]{0:T(1024)S(1)} slice(%weights), slice={[0:2048]}\n", ""
    )
    assert overlaps(copies_alone) == [False]
    assert overlaps(SLICES_AND_COPIES) == [True]


TWO_UPDATES = """\
HloModule updated, is_scheduled=true

%fused (keys: f32[512,64], key: f32[1,64], at: s32[], values: f32[512,64], value: f32[1,64]) -> (f32[512,64], f32[512,64]) {
  %keys = f32[512,64]{1,0} parameter(0)
  %key = f32[1,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %values = f32[512,64]{1,0} parameter(3)
  %value = f32[1,64]{1,0} parameter(4)
  %zero = s32[] constant(0)
  %new_keys = f32[512,64]{1,0} dynamic-update-slice(%keys, %key, %at, %zero)
  %new_values = f32[512,64]{1,0} dynamic-update-slice(%values, %value, %at, %zero)
  ROOT %both = (f32[512,64]{1,0}, f32[512,64]{1,0}) tuple(%new_keys, %new_values)
}

ENTRY %main (keys: f32[512,64], key: f32[1,64], at: s32[], values: f32[512,64], value: f32[1,64]) -> (f32[512,64], f32[512,64]) {
  %keys = f32[512,64]{1,0} parameter(0)
  %key = f32[1,64]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %values = f32[512,64]{1,0} parameter(3)
  %value = f32[1,64]{1,0} parameter(4)
  ROOT %updated = (f32[512,64]{1,0}, f32[512,64]{1,0}) fusion(%keys, %key, %at, %values, %value), kind=kLoop, calls=%fused
}
"""


def test_a_fusion_of_two_updates_moves_only_the_slices() -> None:
    slice_bytes, index_bytes = 64 * 4, 4
    assert Program(TWO_UPDATES).work().num_bytes == 2 * 2 * slice_bytes + index_bytes
