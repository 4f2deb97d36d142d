"""Reader of optimized HLO text: operations, bytes and collectives of a compiled program.

XLA's own `cost_analysis` counts the body of a loop once, and a collective that overlaps with
compute once for each of its parts. Here a loop counts as often as it runs, and a collective once.
What runs on a device is read from the text, so that it needs neither jax nor the device.
The file has more than 400 lines because counting follows the grammar of the text.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Collectives, as HLO names them."""

KERNEL_PRODUCTS = (
    *(("_dkv", 4), ("_dq", 3), ("mha_fwd", 2), ("splash_mha", 2)),
    *(("packed_attention", 2), ("paged_attention", 2)),
)
"""Products of queries and keys in an attention kernel, by a part of its name (FlashAttention-2,
arXiv:2307.08691, section 3.1)."""

_BITS = re.compile(r"[a-z]+(\d+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^{}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_NAME = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations)=\{?([^,}\s]+(?:, ?%[^,}]+)*)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# No operation, or one that only names memory.
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier"),
        *("after-all", "partition-id", "replica-id", "while", "conditional", "call", "domain"),
        *("send", "recv"),
    }
)
# What continues and ends asynchronous instructions: counted at their start.
_ENDS = ("-done", "-update")
_CUTS = ("dynamic-slice", "slice", "gather")


class ArrayShape(NamedTuple):
    """Element type and sizes of an array."""

    dtype: str
    sizes: tuple[int, ...]
    in_main_memory: bool
    """False for memory on the chip, as XLA:TPU assigns it."""

    @property
    def num_bytes(self) -> int:
        found = _BITS.match(self.dtype)
        bits = int(found[1]) if found else 8 if self.dtype == "pred" else 0
        return math.prod(self.sizes) * bits // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    arrays: tuple[ArrayShape, ...]
    """Results."""
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def called(self, *roles: str) -> list[str]:
        """Return the computations that are called in these roles."""
        return [
            name.strip().lstrip("%")
            for role, names in _CALLED.findall(self.attributes)
            if role in roles
            for name in names.split(",")
        ]

    def attribute(self, name: str) -> str:
        """Return an attribute up to the next blank or comma, or all of it within braces."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
        return found[1] if found else ""


class Collective(NamedTuple):
    """A collective operation of each device with the other devices of its group."""

    kind: str
    num_bytes: int
    """Size of the whole array: gathered, or before it is reduced or exchanged."""
    group: tuple[int, ...]
    """Devices of its first group, by their number in the mesh; empty: all."""
    is_asynchronous: bool
    """Whether compute runs meanwhile."""

    def sent_bytes(self, num_devices: int) -> float:
        """Return the bytes that a device sends in a ring of its group.

        Args:
            num_devices: Devices of the program.
        """
        size = len(self.group) or num_devices
        match self.kind:
            case "all-reduce":
                return 2 * self.num_bytes * (size - 1) / size
            case "collective-permute" | "collective-broadcast":
                return float(self.num_bytes)
        return self.num_bytes * (size - 1) / size


@dataclass
class Work:
    """What a device executes."""

    flops: float = 0.0
    """Floating-point operations of products, and of attention kernels without mask but causal."""
    num_bytes: float = 0.0
    """Bytes read from and written to the main memory."""
    collectives: Counter[Collective] = field(default_factory=Counter)
    unknown_loops: int = 0
    """Loops with an unknown number of iterations, counted as one."""
    unknown_kernels: Counter[str] = field(default_factory=Counter)
    """Calls of kernels whose operations are unknown, by name."""

    def add(self, other: Work, times: int = 1) -> None:
        """Add what another part executes `times` times."""
        self.flops += times * other.flops
        self.num_bytes += times * other.num_bytes
        for collective, count in other.collectives.items():
            self.collectives[collective] += times * count
        for kernel, count in other.unknown_kernels.items():
            self.unknown_kernels[kernel] += times * count
        self.unknown_loops += other.unknown_loops

    def overlapping(self, overlaps: bool) -> Work:
        """Return the same work with collectives that overlap with compute, or do not."""
        found = Counter[Collective]()
        for each, count in self.collectives.items():
            found[each._replace(is_asynchronous=overlaps)] += count
        return replace(self, collectives=found)


@dataclass(frozen=True)
class Computation:
    """A function of an HLO program."""

    name: str
    instructions: Mapping[str, Instruction]

    @cached_property
    def root(self) -> Instruction:
        return next(each for each in self.instructions.values() if each.is_root)

    @cached_property
    def parameters(self) -> list[Instruction]:
        found = [each for each in self.instructions.values() if each.opcode == "parameter"]
        return sorted(found, key=lambda each: int(each.operands[0]))

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {}
        for each in self.instructions.values():
            for operand in each.operands:
                found.setdefault(operand, []).append(each)
        return found


class Program:
    """A compiled program, from its text.

    It has more than 200 lines because the work of a computation includes that of those it calls.
    """

    def __init__(self, text: str):
        """
        Args:
            text: `Compiled.as_text()`.

        Raises:
            ValueError: It has no entry computation.
        """
        self.computations: dict[str, Computation] = {}
        self._work: dict[str, Work] = {}
        self._dynamic_trips: int | None = None
        found = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        self._per_slice = int(found[1]) if found else 1
        entry = None
        name, lines = "", dict[str, Instruction]()
        for line in text.splitlines():
            if not line.startswith(" ") and (header := _HEADER.match(line)):
                name, lines = header[2], {}
                entry = name if header[1] else entry
            # Attributes of a kernel may have lines that begin with }}.
            elif name and (line == "}" or line.startswith("}, ")):
                self.computations[name] = Computation(name, lines)
                name = ""
            elif name and (instruction := _instruction(line)):
                lines[instruction.name] = instruction
        if entry is None:
            raise ValueError("expected the text of an HLO module, found no ENTRY computation")
        self.entry = entry

    def work(self, *, dynamic_trips: int | None = None) -> Work:
        """Return what one run of the program executes on each device.

        Args:
            dynamic_trips: Iterations of the outermost loops whose length depends on data.
        """
        self._dynamic_trips = dynamic_trips
        return self._work_of(self.entry)

    def _work_of(self, name: str) -> Work:
        if name not in self._work:
            self._work[name] = work = Work()
            computation = self.computations[name]
            for instruction in computation.instructions.values():
                self._add(work, computation, instruction)
        return self._work[name]

    def _add(self, work: Work, computation: Computation, instruction: Instruction) -> None:
        match instruction.opcode:
            case "while":
                trips = self._num_trips(computation, instruction)
                if trips is None and computation.name == self.entry:
                    trips = self._dynamic_trips
                work.unknown_loops += trips is None
                for called in instruction.called("body"):
                    work.add(self._work_of(called), 1 if trips is None else trips)
            case "conditional":
                branches = [
                    self._work_of(called)
                    for called in (
                        *instruction.called("branch_computations"),
                        *(
                            found.lstrip("%")
                            for found in re.findall(
                                r"(?:true|false)_computation=([^,\s]+)", instruction.attributes
                            )
                        ),
                    )
                ]
                work.add(max(branches, key=lambda each: (each.flops, each.num_bytes)))
            case "call" | "async-start":
                for called in instruction.called("to_apply", "calls"):
                    work.add(self._work_of(called))
            case "call-start":  # on a SparseCore
                for called in instruction.called("to_apply"):
                    overlaps = _overlaps(computation, instruction)
                    work.add(self._work_of(called).overlapping(overlaps))
            case "fusion" | "fusion-start":
                (called,) = instruction.called("calls")
                for inner in self._inside(called):
                    self._add_own(work, *inner)
                work.num_bytes += self._fusion_bytes(computation, instruction, called)
            case _:
                self._add_own(work, computation, instruction)
                work.num_bytes += self._own_bytes(computation, instruction)

    def _inside(self, name: str) -> Iterator[tuple[Computation, Instruction]]:
        """Yield all instructions of a fusion, also of nested fusions."""
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            yield computation, instruction
            if instruction.opcode in ("fusion", "call"):
                for called in instruction.called("calls", "to_apply"):
                    yield from self._inside(called)

    def _add_own(self, work: Work, computation: Computation, instruction: Instruction) -> None:
        """Add what an instruction executes itself: a product, a kernel or a collective."""
        match instruction.opcode:
            case "dot":
                work.flops += _dot_flops(computation, instruction)
            case "convolution":
                work.flops += _convolution_flops(computation, instruction)
            case "custom-call":
                self._add_kernel(work, computation, instruction)
            case "send":
                collective = _between_slices(computation, instruction, self._per_slice)
                if collective is not None:
                    work.collectives[collective] += 1
            case opcode if opcode.removesuffix("-start") in KINDS:
                collective = _collective(computation, instruction)
                # A group of one device moves nothing.
                if collective is not None and len(collective.group) != 1:
                    work.collectives[collective] += 1

    def _add_kernel(self, work: Work, computation: Computation, instruction: Instruction) -> None:
        target = instruction.attribute("custom_call_target").strip('"')
        if "matmul" in target or "gemm" in target:
            work.flops += _gemm_flops(computation, instruction)
        elif target in ("tpu_custom_call", "__gpu$xla.gpu.triton"):
            called = re.search(r'op_name="[^"]*?([^/"]+)/pallas_call"', instruction.attributes)
            name = called[1] if called else re.sub(r"[.\d]+$", "", instruction.name)
            inputs = [array for each in _inputs(computation, instruction) for array in each.arrays]
            flops = _kernel_flops(name, [array for array in inputs if array.num_bytes])
            if flops is None:
                work.unknown_kernels[name] += 1
            else:
                work.flops += flops

    def _num_trips(self, computation: Computation, loop: Instruction) -> int | None:
        """Return the number of iterations of a loop; None if it is unknown."""
        if found := _TRIPS.search(loop.attributes):
            return int(found[1])
        (name,) = loop.called("condition")
        condition = self.computations[name]
        test = condition.root
        inputs = [condition.instructions[each] for each in test.operands]
        if test.opcode == "fusion":
            test = self.computations[test.called("calls")[0]].root
        if test.opcode != "compare" or "direction=LT" not in test.attributes or len(inputs) != 2:
            return None
        start, stop = (self._value(computation, loop, each) for each in inputs)
        return stop - start if start is not None and stop is not None else None

    def _value(
        self, computation: Computation, loop: Instruction, instruction: Instruction
    ) -> int | None:
        """Return the value of an integer at the start of a loop; None if it is unknown."""
        if instruction.opcode == "get-tuple-element":
            index = int(instruction.attribute("index"))
            start = computation.instructions[loop.operands[0]]
            if start.opcode != "tuple":
                return None
            instruction = computation.instructions[start.operands[index]]
            while instruction.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
                instruction = computation.instructions[instruction.operands[0]]
        if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.operands[0]):
            return None
        return int(instruction.operands[0])

    def _own_bytes(self, computation: Computation, instruction: Instruction) -> int:
        """Return the bytes that an instruction outside of fusions reads and writes."""
        opcode = instruction.opcode
        target = instruction.attribute("custom_call_target")
        if opcode in _FREE or opcode.endswith(_ENDS) or "AllocateBuffer" in target:
            return 0
        written = _main_bytes(instruction)
        starts, kind = opcode.endswith("-start"), opcode.removesuffix("-start")
        if kind in (*_CUTS, "dynamic-update-slice", "scatter"):
            whole = computation.instructions[instruction.operands[0]].arrays[0]
            if kind in _CUTS:
                # A start also returns its operands, before the slice.
                part = instruction.arrays[len(instruction.operands) if starts else 0]
            else:
                update = instruction.operands[1 if kind == "dynamic-update-slice" else -1]
                part = computation.instructions[update].arrays[0]
            return part.num_bytes * (part.in_main_memory + whole.in_main_memory)
        if kind in KINDS:
            # A start also returns its operands.
            given = sum(_main_bytes(each) for each in _inputs(computation, instruction))
            return max(written, given) if starts else written + given
        if opcode == "copy-start":
            # From and to: the first two results.
            return sum(array.num_bytes for array in instruction.arrays[:2] if array.in_main_memory)
        return written + sum(_main_bytes(each) for each in _inputs(computation, instruction))

    def _fusion_bytes(self, computation: Computation, fusion: Instruction, called: str) -> int:
        """Return the bytes that a fusion reads and writes: of an array of which it only reads or
        replaces a slice, those of the slice.
        """
        inner = self.computations[called]
        results = _inputs(inner, inner.root) if inner.root.opcode == "tuple" else [inner.root]
        # A start also returns its operands.
        arrays = iter(inner.root.arrays if fusion.opcode == "fusion-start" else fusion.arrays)
        total, replaced = 0, set[str]()
        for result in results:
            written = list(itertools.islice(arrays, len(result.arrays)))
            while result.opcode in ("bitcast", "copy") and result.operands[0] in inner.instructions:
                result = inner.instructions[result.operands[0]]
            if result.opcode == "dynamic-update-slice":
                replaced.add(_source(inner, result.operands[0]))
                total += _main_bytes(inner.instructions[result.operands[1]])
            elif result.opcode == "scatter":
                replaced.add(_source(inner, result.operands[0]))
                total += 2 * _main_bytes(inner.instructions[result.operands[-1]])
            else:
                total += sum(array.num_bytes for array in written if array.in_main_memory)
        for operand, parameter in zip(_inputs(computation, fusion), inner.parameters, strict=False):
            if parameter.name in replaced:
                continue
            users = inner.users.get(parameter.name, [])
            sliced = [each for each in users if each.opcode in _CUTS]
            whole = _main_bytes(operand)
            if users and len(sliced) == len(users):
                read = sum(array.num_bytes for each in sliced for array in each.arrays)
                total += min(whole, read)
            else:
                total += whole
        return total


def mesh_axes(group: Sequence[int], shape: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a mesh along which the devices of a group differ.

    Args:
        group: Numbers of the devices in the mesh; empty: all.
        shape: Size of each axis.
    """
    sizes = tuple(shape.values())
    numbers = np.arange(math.prod(sizes)) if not group else np.array(group)
    places = np.unravel_index(numbers, sizes)
    return tuple(
        axis for axis, along in zip(shape, places, strict=True) if len(np.unique(along)) > 1
    )


def _instruction(line: str) -> Instruction | None:
    if not (found := _NAME.match(line)):
        return None
    rest = line[found.end() :]
    end = _closing(rest) + 1 if rest.startswith("(") else rest.find(" ")
    results, rest = rest[:end], rest[end:].lstrip()
    opcode, bracket, rest = rest.partition("(")
    if not bracket:
        return None
    close = _closing("(" + rest) - 1
    inside = rest[:close]
    operands = tuple(_OPERAND.findall(inside)) or (inside,)
    arrays = tuple(
        ArrayShape(
            dtype,
            tuple(int(size) for size in sizes.split(",") if size),
            not re.search(r"S\([1-9]", layout or ""),
        )
        for dtype, sizes, layout in _ARRAY.findall(results)
    )
    return Instruction(
        found[2], opcode.strip(), arrays, operands, rest[close + 1 :], bool(found[1])
    )


def _closing(text: str) -> int:
    """Return the position of the bracket that closes the first one."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return len(text)


def _inputs(computation: Computation, instruction: Instruction) -> list[Instruction]:
    found = (computation.instructions.get(name) for name in instruction.operands)
    return [each for each in found if each is not None]


def _main_bytes(instruction: Instruction) -> int:
    return sum(array.num_bytes for array in instruction.arrays if array.in_main_memory)


def _source(computation: Computation, name: str) -> str:
    """Return the instruction whose memory this one only names."""
    while (found := computation.instructions[name]).opcode in ("bitcast", "copy"):
        name = found.operands[0]
    return name


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _dot_flops(computation: Computation, dot: Instruction) -> float:
    """2 · size of the result · size of the contracted dimensions."""
    left = computation.instructions[dot.operands[0]].arrays[0].sizes
    contracted = _numbers(dot.attribute("lhs_contracting_dims"))
    return 2.0 * math.prod(dot.arrays[0].sizes) * math.prod(left[each] for each in contracted)


def _gemm_flops(computation: Computation, call: Instruction) -> float:
    """As `_dot_flops`, for a call of a library of products."""
    left = computation.instructions[call.operands[0]].arrays[0].sizes
    found = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', call.attributes)
    contracted = _numbers(found[1]) if found else (len(left) - 1,)
    return 2.0 * math.prod(call.arrays[0].sizes) * math.prod(left[each] for each in contracted)


def _kernel_flops(name: str, inputs: Sequence[ArrayShape]) -> float | None:
    """Operations of a kernel; None if they are unknown.

    Those of experts are counted for all rows, of which padding and, with an expert axis, rows of
    tokens that go elsewhere are skipped.
    """
    if name in ("grouped_product", "grouped_gradient"):
        # x [R, I] or [R, O] and matrices [E, I, O], or x [R, I] and gradients [R, O].
        x, other = (array.sizes for array in inputs[:2])
        return 2.0 * x[0] * math.prod(other[1:]) * (x[1] if len(other) == 2 else 1)
    products = next((count for part, count in KERNEL_PRODUCTS if part in name), None)
    if products is None:
        return None
    if wide := [array.sizes for array in inputs if len(array.sizes) == 4]:
        longest = wide[0][1]  # queries [B, T, N, H], as many keys
        if name == "paged_attention":
            # Queries [B, K, rows, H], pages [K, P, p, H], table [B, M] or [B, 1, M]; nothing is
            # masked.
            tables = [a.sizes for a in inputs if a.dtype == "s32" and len(a.sizes) > 1]
            if not tables or len(wide) < 2:
                return None
            longest = 2 * tables[0][-1] * wide[1][2]
        return float(products * math.prod(wide[0]) * longest)
    wide = [array.sizes for array in inputs if len(array.sizes) == 3]
    if len(wide) < 2:
        return None
    # Queries [N, T, H], and the longest of the others, keys or values [K, S, H].
    queries, keys = max(wide, key=math.prod), wide[-1]
    return float(products * math.prod(queries) * max(sizes[1] for sizes in (queries, keys)))


def _convolution_flops(computation: Computation, convolution: Instruction) -> float:
    """2 · batch · features of input and output · pairs of a position of the result and one of the
    window that is not padding, as in XLA's HandleConvolution. XLA:TPU has products in this form.
    """
    left, right = (computation.instructions[each].arrays[0].sizes for each in convolution.operands)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if labels is None:
        return 0.0
    of_left, of_right, of_result = labels.groups()
    result = convolution.arrays[0].sizes
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", convolution.attribute("window")))
    pairs = 1
    spatial = sorted(label for label in of_left if label.isdigit())
    for place, label in enumerate(spatial):

        def of(key: str, default: int, place: int = place) -> int:
            values = window.get(key)
            return int(values.split("x")[place]) if values else default

        low = window.get("pad", "")
        pad = int(low.split("x")[place].split("_")[0]) if low else 0
        base = of("lhs_dilate", 1)
        length = left[of_left.index(label)]
        at = (
            np.arange(result[of_result.index(label)])[:, None] * of("stride", 1)
            - pad
            + np.arange(right[of_right.index(label)])[None, :] * of("rhs_dilate", 1)
        )
        pairs *= int(((at >= 0) & (at < (length - 1) * base + 1) & (at % base == 0)).sum())
    batch_groups = int(convolution.attribute("batch_group_count") or 1)
    return (
        2.0
        * (left[of_left.index("b")] // batch_groups)
        * right[of_right.index("i")]
        * result[of_result.index("f")]
        * pairs
    )


def _collective(computation: Computation, instruction: Instruction) -> Collective | None:
    """Return the collective of an instruction; None where it is a part of one that is counted
    elsewhere.
    """
    attributes = instruction.attributes
    is_asynchronous = "async" in computation.name or (
        instruction.opcode.endswith("-start") and _overlaps(computation, instruction)
    )
    if "chain_id=" in attributes:
        # XLA:TPU repeats an overlapping collective in each fusion that it overlaps with.
        users = computation.users.get(instruction.name, [])
        if not any("AsyncCollectiveStart" in each.attributes for each in users):
            return None
        is_asynchronous = True
    kind = instruction.opcode.removesuffix("-start")
    given = [array for each in _inputs(computation, instruction) for array in each.arrays]
    if kind == "all-gather":
        # A start returns its operands before its results.
        arrays = list(instruction.arrays)
        arrays = arrays[len(given) :] if len(arrays) > len(given) else arrays
    else:
        arrays = given
    if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
        # XLA:TPU fuses a reduce-scatter as an all-reduce of which each device takes its part.
        kind = "reduce-scatter"
    return Collective(
        kind, sum(array.num_bytes for array in arrays), _group(attributes), is_asynchronous
    )


def _between_slices(
    computation: Computation, send: Instruction, per_slice: int
) -> Collective | None:
    """Return a collective between slices, of which XLA:TPU makes a transfer to the host; None for
    other transfers.

    Args:
        computation: Where it is.
        send: Its first half.
        per_slice: Devices of a slice, which are numbered one slice after the other.
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.attributes)
    slices = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', send.attributes)
    if kind is None or slices is None:
        return None
    ends = (part.split(":") for part in slices[1].split(","))
    count = sum(int(each[-1]) - int(each[0]) + 1 for each in ends)
    num_bytes = send.arrays[0].num_bytes
    name = kind[1].lower().replace("_", "-")
    return Collective(
        name,
        num_bytes * (count if name == "all-gather" else 1),
        tuple(range(0, count * per_slice, per_slice)),
        _overlaps(computation, send),
    )


def _overlaps(computation: Computation, start: Instruction) -> bool:
    """Return whether the device computes between the start of a collective and its end.

    Copies by its DMA engines are no computation. XLA:GPU makes all collectives asynchronous, and
    marks those that end before anything else runs.
    """
    if '"is_sync":true' in start.attributes:
        return False
    is_started = False
    for each in computation.instructions.values():
        if is_started and start.name in each.operands and each.opcode.endswith("-done"):
            return False
        begun = each.opcode.removesuffix("-start")
        waits = begun in (*_FREE, *KINDS) or begun.endswith(_ENDS)
        copies = begun != each.opcode and begun in ("copy", *_CUTS)
        if is_started and not waits and not copies:
            return True
        is_started |= each is start
    return False


def _group(attributes: str) -> tuple[int, ...]:
    """Return the devices of the first group of a collective; empty: all."""
    if pairs := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", attributes):
        return int(pairs[1]), int(pairs[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return _numbers(listed[1])
    if tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\S+)", attributes):
        return tuple(_iota(tiled[3]).reshape(int(tiled[1]), int(tiled[2]))[0].tolist())
    if named := re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}", attributes
    ):
        return _group_on_mesh(*named.groups(default=""))
    return ()


def _iota(text: str) -> Int[np.ndarray, "_"]:
    """Return numbers of devices from `[2,4]T(1,0)`: counted in this shape, then transposed."""
    shape, _, order = text.partition("T(")
    numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
    return (numbers.transpose(_numbers(order)) if order else numbers).reshape(-1)


def _group_on_mesh(axes: str, devices: str, along: str) -> tuple[int, ...]:
    """Return the first group along axes of a mesh, or parts of them: 'axis':(before)size."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
    numbers = np.arange(math.prod(sizes.values()))
    if devices:
        numbers = _iota(devices) if "[" in devices else np.array(_numbers(devices))
    numbers = numbers.reshape(tuple(sizes.values()))
    index: list[list[int]] = [[0] for _ in sizes]
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", along):
        axis, whole = list(sizes).index(name), sizes[name]
        step = whole // (int(before) * int(size)) if size else 1
        index[axis] = [each * step for each in range(int(size) if size else whole)]
    return tuple(numbers[np.ix_(*index)].reshape(-1).tolist())
