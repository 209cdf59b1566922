"""Places of a warp's registers, and the rows of instructions that name them (machine/machine.h).

Immediates, parameters, and %tid and its like are registers, too: the last ones of each warp.
"""

import struct
from typing import NamedTuple

from ptx.meaning import Meaning
from ptx.parse import Address, Operand, Program

SPECIAL = (
    "%tid.x", "%laneid", "%ntid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%warpid"
)  # fmt: skip
ALWAYS = {
    "%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1, "%cluster_ctarank": 0, "%clusterid.x": 0, "global_smem": 0
}  # fmt: skip
COMPUTE, BRANCH, END, TURN, BARRIER, TOGETHER = range(6)  # kinds of rows
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


class Places:
    """The places of a program's registers, and of the constants that its instructions name.

    data:       bytes of the last registers: SPECIAL, parameters, immediates
    parameters: for each its register's place within these, and its bytes
    """

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

    def place(self, operand: Operand, bits: int) -> int:
        """The place of a register, or of a constant of so many bits."""
        if not isinstance(operand, str):
            raise ValueError(f"expected a register or a number, got {operand}")
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
            bits = self.program.registers[str(operand)]
        elif operand in SPECIAL:
            bits = 32
        return bits if bits == 1 else max(16, bits)

    def pair(self, operand: Operand, bits: int) -> list[int]:
        """The place and the bytes of a register."""
        return [self.place(operand, max(16, bits)), self.width(operand, bits) // 8]

    def address(self, operand: Operand) -> list[int]:
        """The place, the bytes and the offset of an address."""
        if not isinstance(operand, Address):
            raise ValueError(f"expected an address, got {operand}")
        return [*self.pair(operand.base, 32 if operand.base in ALWAYS else 64), operand.offset]


def _value(text: str) -> int:
    """The bits of an immediate; a negative number for what is below zero."""
    if text in ALWAYS:
        return ALWAYS[text]
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)
