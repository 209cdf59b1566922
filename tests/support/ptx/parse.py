"""PTX as instructions: the text that Triton's compiler gives to ptxas, taken apart.

A program is what stands in the braces of the one `.entry`. Registers of inner braces, which inline assembly has, get
names of their own.
"""

import re
from typing import NamedTuple

BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32,
    "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64,
}  # fmt: skip

_STATEMENT = re.compile(r"\s*(?:(?P<label>[\w$]+):(?!:)|(?P<brace>[{}])|(?P<text>[^;{}]+(?:\{[^{}]*\}[^;{}]*)*);)")
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{\[][^,]*")
_LINES = re.compile(r"//[^\n]*|^\s*\.(?:loc|file|section)\b[^\n]*", re.MULTILINE)


class Address(NamedTuple):
    """[base + offset], where base is a register, a parameter or a name of shared memory."""

    base: str
    offset: int


Operand = str | tuple[str, ...] | Address


class Instruction(NamedTuple):
    """`@%p1 add.s32 %r1, %r2, 3;` has the guard %p1, the name add, and s32 as its modifiers and its kind."""

    text: str
    guard: str
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]

    @property
    def kind(self) -> str:
        """The type that the instruction computes with: the last one that it names; "" if there is none."""
        return next((one for one in reversed(self.modifiers) if one in BITS), "")


class Program(NamedTuple):
    """A kernel.

    parameters: bytes of each, by name, in their order
    registers:  bits of each register that is used, by name
    labels:     the place in `instructions` that each label stands before
    """

    parameters: dict[str, int]
    registers: dict[str, int]
    instructions: list[Instruction]
    labels: dict[str, int]


class _Scopes:
    """Declared registers, of the braces that are open."""

    def __init__(self) -> None:
        self.open: list[dict[str, tuple[str, int]]] = []
        self.made = 0

    def declare(self, text: str) -> None:
        kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL).groups()
        for name in names.split(","):
            self.made += 1
            own, several, _ = name.strip().partition("<")  # %r<8> declares %r0 to %r7, and no %r
            self.open[-1][own + several] = (own if len(self.open) == 1 else f"{own}@{self.made}:", BITS[kind])

    def find(self, name: str) -> tuple[str, int] | None:
        """The full name and the bits of a register; None if it is no register."""
        for scope in reversed(self.open):
            if name in scope:
                return scope[name]
            if (own := name.rstrip("0123456789")) + "<" in scope:
                full, bits = scope[own + "<"]
                return full + name.removeprefix(own), bits
        return None


def parse(ptx: str) -> Program:
    """The kernel of a PTX text; raises ValueError for what this reader does not know."""
    text = _LINES.sub("", ptx)
    entry = re.search(r"\.entry\s+\S+?\s*\((.*?)\)[^{]*(?=\{)", text, re.DOTALL)
    if entry is None:
        raise ValueError("expected PTX with an .entry")
    declared = re.findall(r"\.param\s+\.(\w+)[^,]*?([\w$]+_param_\d+)", entry[1])
    program = Program({name: BITS[kind] // 8 for kind, name in declared}, {}, [], {})
    scopes, at = _Scopes(), entry.end()
    while found := _STATEMENT.match(text, at):
        at = found.end()
        if found["label"]:
            program.labels[found["label"]] = len(program.instructions)
        elif found["brace"] == "{":
            scopes.open.append({})
        elif found["brace"]:
            scopes.open.pop()
            if not scopes.open:
                return program
        elif found["text"].startswith(".reg"):
            scopes.declare(found["text"].strip())
        elif not found["text"].startswith("."):
            program.instructions.append(_instruction(found["text"].strip(), scopes, program.registers))
        elif not found["text"].startswith(".pragma") and not _is_unused(found["text"], text):
            raise ValueError(f"unknown PTX directive: {found['text'].strip()[:80]}")
    raise ValueError("the braces of a PTX kernel do not close")


def _is_unused(directive: str, text: str) -> bool:
    """True for local memory that is declared and nothing more, as LLVM leaves it behind."""
    name = re.fullmatch(r"\.local\s.*?(\w+)\[\d+\]", directive.strip(), re.DOTALL)
    return name is not None and text.count(name[1]) == 1


def _instruction(text: str, scopes: _Scopes, registers: dict[str, int]) -> Instruction:
    def renamed(found: re.Match[str]) -> str:
        register = scopes.find(found[0])
        if register is None:
            return found[0]
        registers[register[0]] = register[1]
        return register[0]

    guarded = re.match(r"@(!?)\s*(\S+)\s+", text)
    guard, rest = "", text
    if guarded:
        guard, rest = guarded[1] + re.sub(r".+", renamed, guarded[2]), text[guarded.end() :]
    opcode, *given = rest.split(None, 1)
    operands = re.sub(r"[%$]?[A-Za-z_][\w$]*", renamed, given[0]) if given else ""
    name, *modifiers = opcode.split(".")
    parts = tuple(_operand(part.strip()) for part in _OPERAND.findall(operands))
    return Instruction(text, guard, name, tuple(modifiers), parts)


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    if text.startswith("["):
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return Address(base, int(offset or "0", 0))
    return text
