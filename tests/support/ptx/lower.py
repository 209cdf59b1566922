"""Instructions as rows of the machine: a function, and numbers that it reads its operands from (machine/machine.h).

Immediates, parameters, and %tid and its like are registers, too: the last ones of each warp.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

from ptx.meaning import Meaning, meaning
from ptx.parse import BITS, Address, Instruction, Operand, Program

SPECIAL = ("%tid.x", "%laneid", "%ntid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z",
           "%warpid")  # fmt: skip
ALWAYS = {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%cluster_ctarank": 0, "%clusterid.x": 0, "global_smem": 0}
NOTHING = {"membar", "griddepcontrol", "discard", "prefetch", "applypriority", "setmaxnreg"}
COMPUTE, BRANCH, END, BARRIER, TURN = range(5)
LANES = 32


class Form(NamedTuple):
    """Instructions that one C++ function serves: of a meaning, with registers of some widths, the result's first."""

    meaning: Meaning
    widths: tuple[int, ...]


class Row(NamedTuple):
    """An instruction of the machine. guard: a predicate's place, or -1; sense: what it must be."""

    text: str
    function: Form | str
    operands: list[int]
    kind: int = COMPUTE
    target: int = 0
    guard: int = -1
    sense: int = 1


class Lowered(NamedTuple):
    """A program for the machine.

    constants:  bytes of the last registers: SPECIAL, parameters, immediates
    parameters: for each its register's place within these, and its bytes
    size:       bytes of a warp's registers
    """

    rows: list[Row]
    constants: bytes
    parameters: list[tuple[int, int]]
    size: int


class UnknownInstruction(NotImplementedError):
    """An instruction that this machine does not have."""


def lower(program: Program) -> Lowered:
    """The rows of a program; raises UnknownInstruction."""
    lowering = _Lowering(program)
    starts, rows = [], []
    for instruction in program.instructions:
        starts.append(len(rows))
        guard, sense = -1, 1
        if instruction.guard:
            guard, sense = lowering.place(instruction.guard.lstrip("!"), 1), int(instruction.guard[0] != "!")
        rows += [row._replace(guard=guard, sense=sense) for row in lowering.rows_of(instruction)]
    starts.append(len(rows))
    rows = [row if row.kind != BRANCH else row._replace(target=starts[row.target]) for row in rows]
    return Lowered(rows, *lowering.registers())


class _Lowering:
    """The places of registers and constants, and the rows of each instruction."""

    def __init__(self, program: Program):
        self.program = program
        self.own: dict[str, int] = {}
        self.first = 0  # place of what is constant
        for name, bits in program.registers.items():
            self.own[name] = self.first
            self.first += 64 if bits == 1 else max(2, bits // 8) * LANES
        self.data = bytearray(4 * LANES * len(SPECIAL))
        self.constants: dict[bytes, int] = {}
        self.parameters: dict[str, tuple[int, int]] = {}
        for name, size in program.parameters.items():
            self.parameters[name] = len(self.data), size
            self.data += bytes(8 * LANES)

    def registers(self) -> tuple[bytes, list[tuple[int, int]], int]:
        """The last fields of what is lowered."""
        return bytes(self.data), [*self.parameters.values()], self.first + len(self.data)

    def place(self, operand: Operand, bits: int) -> int:
        """The place of a register, or of a constant of so many bits."""
        assert isinstance(operand, str), operand
        if operand in self.own:
            return self.own[operand]
        if operand in SPECIAL:
            return self.first + 4 * LANES * SPECIAL.index(operand)
        value = _value(operand)
        if bits == 1:
            values = struct.pack("<I", 0xFFFFFFFF * (value & 1)).ljust(64, b"\0")
        else:
            size = max(2, bits // 8)
            values = (value & (1 << 8 * size) - 1).to_bytes(size, "little") * LANES
        if values not in self.constants:
            self.constants[values] = len(self.data)
            self.data += values
        return self.first + self.constants[values]

    def width(self, operand: Operand, bits: int) -> int:
        """Bits of the register that holds an operand of a type with so many bits: a predicate 1, else 16 and more."""
        if operand in self.program.registers:
            bits = self.program.registers[operand]
        elif operand in SPECIAL:
            bits = 32
        return bits if bits == 1 else max(16, bits)

    def pair(self, operand: Operand, bits: int) -> list[int]:
        """The place and the bytes of a register."""
        return [self.place(operand, max(16, bits)), self.width(operand, bits) // 8]

    def rows_of(self, given: Instruction) -> list[Row]:
        meanings = meaning(given)
        if meanings is not None:
            return self._computing(given, meanings)
        if given.name in NOTHING or (given.name == "fence" and "proxy" not in given.modifiers):
            return []
        lowered: Callable[[Instruction], list[Row]] | None = getattr(self, f"_lower_{given.name}", None)
        if lowered is None:
            raise UnknownInstruction(given.text)
        try:
            return lowered(given)
        except (AssertionError, KeyError, ValueError, IndexError, StopIteration) as error:
            raise UnknownInstruction(f"{given.text} ({error!r})") from error

    def _computing(self, given: Instruction, meanings: list[Meaning]) -> list[Row]:
        first = given.operands[0]
        results = first if isinstance(first, tuple) else str(first).split("|") if meanings[0].result == "pred" else (first,)
        operands = [one for each in given.operands[1:] for one in (each if isinstance(each, tuple) else (each,))]
        rows = []
        for result, each in zip(results, meanings, strict=True):
            if result == "_":
                continue
            places, widths, guard = [], [], []
            for operand, kind in zip((result, *operands[: len(each.sources)]), (each.result, *each.sources), strict=True):
                bits, name = bits_of(kind), str(operand)
                is_not = name.startswith("!")
                if is_not:
                    guard.append(len(places))
                    name = name[1:]
                places.append(self.place(name, bits))
                widths.append(self.width(name, bits))
            formula = each.formula
            for at in guard:
                letter = "abcd"[at - 1]
                formula = f"[&](bool {letter}) {{ return {formula}; }}(!{letter})"
            rows.append(Row(given.text, Form(each._replace(formula=formula), tuple(widths)), places))
        return rows

    def _address(self, address: Operand) -> list[int]:
        """The place, the bytes and the offset of an address."""
        assert isinstance(address, Address), address
        return [*self.pair(address.base, 32 if address.base in ALWAYS else 64), address.offset]

    def _lower_ld(self, given: Instruction) -> list[Row]:
        target, address = given.operands[:2]
        if "param" in given.modifiers:
            assert isinstance(address, Address) and address.offset == 0
            place, size = self.parameters[address.base]
            place += self.first
            bits = BITS[given.kind]
            form = Form(Meaning(f"b{bits}", (f"b{8 * size}",), "a"), (self.width(target, bits), max(16, 8 * size)))
            return [Row(given.text, form, [self.place(target, bits), place])]
        return [self._access("ptx_load", given, address, target)]

    def _lower_st(self, given: Instruction) -> list[Row]:
        return [self._access("ptx_store", given, given.operands[0], given.operands[1])]

    def _access(self, function: str, given: Instruction, address: Operand, values: Operand) -> Row:
        assert "local" not in given.modifiers, "local memory"
        numbers = values if isinstance(values, tuple) else (values,)
        bits = BITS[given.kind]
        own = [part for one in numbers for part in self.pair(one, bits)]
        head = [_space(given), *self._address(address), bits // 8, len(numbers), int(given.kind[0] == "s")]
        return Row(given.text, function, head + own)

    def _lower_atom(self, given: Instruction) -> list[Row]:
        return self._atomic(given, given.operands[0], given.operands[1], given.operands[2:])

    def _lower_red(self, given: Instruction) -> list[Row]:
        return self._atomic(given, "_", given.operands[0], given.operands[1:])

    def _atomic(self, given: Instruction, result: Operand, address: Operand, values: tuple[Operand, ...]) -> list[Row]:
        names = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
        operation = next(names.index(one) for one in given.modifiers if one in names)
        bits = BITS[given.kind]
        assert bits >= 32, "an atomic of 16 bits"
        places = [self.place(one[0] if isinstance(one, tuple) else one, bits) for one in values]
        kind = 2 if given.kind[0] == "f" else int(given.kind[0] == "s")
        target = -1 if result == "_" else self.place(result[0] if isinstance(result, tuple) else result, bits)
        head = [_space(given), *self._address(address), bits // 8, 1, kind, operation, target]
        return [Row(given.text, "ptx_atomic", [*head, places[0], places[-1]])]

    def _lower_bra(self, given: Instruction) -> list[Row]:
        return [Row(given.text, "", [], BRANCH, self.program.labels[str(given.operands[-1])])]

    def _lower_ret(self, given: Instruction) -> list[Row]:
        return [Row(given.text, "", [], END)]

    _lower_exit = _lower_ret

    def _lower_nanosleep(self, given: Instruction) -> list[Row]:
        return [Row(given.text, "", [], TURN)]

    def _lower_bar(self, given: Instruction) -> list[Row]:
        if "warp" in given.modifiers:
            return []  # lanes of a warp are in step here
        assert "sync" in given.modifiers and not {"red", "arrive"}.intersection(given.modifiers)
        number, *count = (int(str(one), 0) for one in given.operands)
        return [Row(given.text, "", [number, *(count or [0])], BARRIER)]

    _lower_barrier = _lower_bar

    def _lower_shfl(self, given: Instruction) -> list[Row]:
        result, _, there = str(given.operands[0]).partition("|")
        mode = ("up", "down", "bfly", "idx").index(given.modifiers[1])
        places = [self.place(one, 32) for one in given.operands[1:]]
        return [Row(given.text, "ptx_shuffle", [mode, self.place(result, 32), self.place(there, 1) if there else -1, *places])]

    def _lower_vote(self, given: Instruction) -> list[Row]:
        mode = ("ballot", "any", "all", "uni").index(given.modifiers[1])
        asked = str(given.operands[1])
        result = self.place(given.operands[0], 1 if mode else 32)
        return [Row(given.text, "ptx_vote", [mode, result, self.place(asked.lstrip("!"), 1), int(asked[0] != "!")])]

    def _lower_redux(self, given: Instruction) -> list[Row]:
        operation = ("add", "min", "max", "and", "or", "xor").index(given.modifiers[1])
        places = [self.place(one, 32) for one in given.operands[:2]]
        return [Row(given.text, "ptx_reduce", [operation, int(given.kind[0] == "s"), *places])]

    def _lower_elect(self, given: Instruction) -> list[Row]:
        result, _, there = str(given.operands[0]).partition("|")
        return [Row(given.text, "ptx_elect", [-1 if result == "_" else self.place(result, 32), self.place(there, 1) if there else -1])]

    def _lower_activemask(self, given: Instruction) -> list[Row]:
        return [Row(given.text, "ptx_active", [self.place(given.operands[0], 32)])]

    def _lower_fence(self, given: Instruction) -> list[Row]:
        return [Row(given.text, "ptx_proxy_fence", [])]

    def _lower_cp(self, given: Instruction) -> list[Row]:
        if "commit_group" in given.modifiers:
            return [Row(given.text, "ptx_copy_commit", [])]
        if "wait_group" in given.modifiers:
            return [Row(given.text, "ptx_copy_wait", [int(str(given.operands[0]))])]
        if "wait_all" in given.modifiers:
            return [Row(given.text, "ptx_copy_wait", [-1])]
        assert given.modifiers[0] == "async" and "bulk" not in given.modifiers
        to, source, size, *reads = given.operands
        (to_place, _, to_offset), (from_place, _, from_offset) = self._address(to), self._address(source)
        read = self.place(reads[0], 32) if reads else -1
        return [Row(given.text, "ptx_copy", [to_place, to_offset, from_place, from_offset, int(str(size), 0), read])]

    def _lower_ldmatrix(self, given: Instruction) -> list[Row]:
        return [self._matrix("ptx_load_matrix", given, *given.operands)]

    def _lower_stmatrix(self, given: Instruction) -> list[Row]:
        return [self._matrix("ptx_store_matrix", given, *reversed(given.operands))]

    def _matrix(self, function: str, given: Instruction, values: Operand, address: Operand) -> Row:
        assert "m8n8" in given.modifiers and given.kind == "b16"
        numbers = [self.place(one, 32) for one in (values if isinstance(values, tuple) else (values,))]
        place, _, offset = self._address(address)
        return Row(given.text, function, [len(numbers), int("trans" in given.modifiers), place, offset, *numbers])

    def _lower_mma(self, given: Instruction) -> list[Row]:
        assert "m16n8k16" in given.modifiers and given.kind == "f32"
        places = [self.place(one, 32) for each in given.operands for one in each]
        return [Row(given.text, "ptx_mma", [int("f16" in given.modifiers), *places])]

    def _lower_wgmma(self, given: Instruction) -> list[Row]:
        if given.modifiers[0] == "fence":
            return [Row(given.text, "ptx_wgmma_fence", [])]
        if given.modifiers[0] == "commit_group":
            return [Row(given.text, "ptx_wgmma_commit", [])]
        if given.modifiers[0] == "wait_group":
            return [Row(given.text, "ptx_wgmma_wait", [int(str(given.operands[0]))])]
        shape = next(one for one in given.modifiers if one.startswith("m64n"))
        columns, depth = (int(part) for part in shape.removeprefix("m64n").split("k"))
        assert depth == 16 and "f32" in given.modifiers and given.kind in ("f16", "bf16")
        to, a, b, counts, one, other, *turned = given.operands
        assert (one, other) == ("1", "1") and len(to) == columns // 2
        own = isinstance(a, tuple)
        turned = [*([0] if own else []), *(int(str(one)) for one in turned), 0, 0][:2]
        flags = own + 2 * turned[0] + 4 * turned[1] + 8 * (given.kind == "f16")
        places = [self.place(one, 32) for one in a] if own else [0] * 4
        descriptor = 0 if own else self.place(a, 64)
        head = [columns, flags, self.place(counts, 1), descriptor, self.place(b, 64), *places]
        return [Row(given.text, "ptx_wgmma", head + [self.place(each, 32) for each in to])]


def bits_of(kind: str) -> int:
    """The bits of a type; of a half of two, those of both."""
    return BITS[kind.partition(".")[0]]


def _space(given: Instruction) -> int:
    """1 for shared memory, 0 for global memory, 2 for such that others may change at any time."""
    if any(one.startswith("shared") for one in given.modifiers):
        return 1
    return 2 * bool({"volatile", "relaxed", "acquire", "release"}.intersection(given.modifiers))


def _value(text: str) -> int:
    """The bits of an immediate; a negative number for what is below zero."""
    if text in ALWAYS:
        return ALWAYS[text]
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)
