"""Rows of the instructions that do more than compute: memory, control, what lanes tell each other, products.

Each function here takes the places of registers and an instruction, and gives its rows: the operands stand as the
functions of machine/memory.h, lanes.h and products.h say. It raises ValueError or KeyError for what the machine lacks.
"""

from collections.abc import Callable

from ptx.meaning import Meaning
from ptx.parse import BITS, Address, Instruction, Operand
from ptx.places import BARRIER, BRANCH, END, TURN, Form, Places, Row

ATOMIC = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
REDUCED = ("add", "min", "max", "and", "or", "xor")
SHUFFLED = ("up", "down", "bfly", "idx")
MULTIPLIED = ("bf16", "f16", "tf32")
VOTED = ("ballot", "any", "all", "uni")


def expect(condition: bool, what: str) -> None:
    """Raise ValueError unless the condition holds."""
    if not condition:
        raise ValueError(f"expected {what}")


def several(operand: Operand) -> tuple[str, ...]:
    """The registers of an operand, in braces or not."""
    return operand if isinstance(operand, tuple) and not isinstance(operand, Address) else (str(operand),)


def space(given: Instruction) -> int:
    """1 for shared memory, 0 for global memory, 2 for such that others may change at any time."""
    if any(one.startswith("shared") for one in given.modifiers):
        return 1
    return 2 * bool({"volatile", "relaxed", "acquire", "release"}.intersection(given.modifiers))


def load(places: Places, given: Instruction) -> list[Row]:
    target, address = given.operands[:2]
    if "param" not in given.modifiers:
        return [access("ptx_load", places, given, address, target)]
    expect(isinstance(address, Address) and address.offset == 0, "a parameter")
    place, size = places.parameters[address.base]
    bits = BITS[given.kind]
    form = Form(Meaning(f"b{bits}", (f"b{8 * size}",), "a"), (places.width(target, bits), max(16, 8 * size)))
    return [Row(given.text, form, [places.place(target, bits), places.first + place])]


def store(places: Places, given: Instruction) -> list[Row]:
    return [access("ptx_store", places, given, given.operands[0], given.operands[1])]


def access(function: str, places: Places, given: Instruction, address: Operand, values: Operand) -> Row:
    expect("local" not in given.modifiers, "no local memory")
    bits, numbers = BITS[given.kind], several(values)
    own = [part for one in numbers for part in places.pair(one, bits)]
    head = [space(given), *places.address(address), bits // 8, len(numbers), int(given.kind[0] == "s")]
    return Row(given.text, function, head + own)


def prefetch(places: Places, given: Instruction) -> list[Row]:
    expect("global" in given.modifiers, "a prefetch from global memory")
    return [Row(given.text, "ptx_prefetch", [*places.address(given.operands[0])])]


def atomic(places: Places, given: Instruction) -> list[Row]:
    return _atomic(places, given, *given.operands)


def reduction(places: Places, given: Instruction) -> list[Row]:
    return _atomic(places, given, "_", *given.operands)


def _atomic(places: Places, given: Instruction, result: Operand, address: Operand, *values: Operand) -> list[Row]:
    operation = next(ATOMIC.index(one) for one in given.modifiers if one in ATOMIC)
    bits = BITS[given.kind]
    expect(bits >= 32, "an atomic of 32 or 64 bits")
    own = [places.place(several(one)[0], bits) for one in values]
    kind = 2 if given.kind[0] == "f" else int(given.kind[0] == "s")
    target = -1 if result == "_" else places.place(several(result)[0], bits)
    head = [space(given), *places.address(address), bits // 8, 1, kind, operation, target]
    return [Row(given.text, "ptx_atomic", [*head, own[0], own[-1]])]


def branch(places: Places, given: Instruction) -> list[Row]:
    return [Row(given.text, "", [], BRANCH, places.program.labels[str(given.operands[-1])])]


def end(places: Places, given: Instruction) -> list[Row]:
    return [Row(given.text, "", [], END)]


def turn(places: Places, given: Instruction) -> list[Row]:
    return [Row(given.text, "", [], TURN)]


def barrier(places: Places, given: Instruction) -> list[Row]:
    if "warp" in given.modifiers:
        return []  # lanes of a warp are in step here
    expect("sync" in given.modifiers and "red" not in given.modifiers, "bar.sync")
    number, *count = (int(str(one), 0) for one in given.operands)
    return [Row(given.text, "", [number, *(count or [0])], BARRIER)]


def shuffle(places: Places, given: Instruction) -> list[Row]:
    result, _, there = str(given.operands[0]).partition("|")
    head = [SHUFFLED.index(given.modifiers[1]), places.place(result, 32), places.place(there, 1) if there else -1]
    return [Row(given.text, "ptx_shuffle", head + [places.place(one, 32) for one in given.operands[1:]])]


def vote(places: Places, given: Instruction) -> list[Row]:
    mode, asked = VOTED.index(given.modifiers[1]), str(given.operands[1])
    result = places.place(given.operands[0], 1 if mode else 32)
    return [Row(given.text, "ptx_vote", [mode, result, places.place(asked.lstrip("!"), 1), int(asked[0] != "!")])]


def reduce(places: Places, given: Instruction) -> list[Row]:
    own = [places.place(one, 32) for one in given.operands[:2]]
    operation = REDUCED.index(given.modifiers[1])
    return [Row(given.text, "ptx_reduce", [operation, int(given.kind[0] == "s"), *own])]


def elect(places: Places, given: Instruction) -> list[Row]:
    result, _, there = str(given.operands[0]).partition("|")
    own = [-1 if result == "_" else places.place(result, 32), places.place(there, 1) if there else -1]
    return [Row(given.text, "ptx_elect", own)]


def active(places: Places, given: Instruction) -> list[Row]:
    return [Row(given.text, "ptx_active", [places.place(given.operands[0], 32)])]


def fence(places: Places, given: Instruction) -> list[Row]:
    return [Row(given.text, "ptx_proxy_fence", [])] if "proxy" in given.modifiers else []


def copy(places: Places, given: Instruction) -> list[Row]:
    if "commit_group" in given.modifiers:
        return [Row(given.text, "ptx_copy_commit", [])]
    if "wait_group" in given.modifiers or "wait_all" in given.modifiers:
        return [Row(given.text, "ptx_copy_wait", [int(str(one)) for one in given.operands] or [-1])]
    expect("async" in given.modifiers and "bulk" not in given.modifiers, "cp.async")
    to, source, size, *reads = given.operands
    (to_place, _, to_offset), (from_place, _, from_offset) = places.address(to), places.address(source)
    read = places.place(reads[0], 32) if reads else -1
    return [Row(given.text, "ptx_copy", [to_place, to_offset, from_place, from_offset, int(str(size), 0), read])]


def load_matrix(places: Places, given: Instruction) -> list[Row]:
    return [matrix("ptx_load_matrix", places, given, *given.operands)]


def store_matrix(places: Places, given: Instruction) -> list[Row]:
    return [matrix("ptx_store_matrix", places, given, *reversed(given.operands))]


def matrix(function: str, places: Places, given: Instruction, values: Operand, address: Operand) -> Row:
    expect("m8n8" in given.modifiers and given.kind == "b16", "matrices of 8 x 8 numbers of 16 bits")
    numbers = [places.place(one, 32) for one in several(values)]
    place, _, offset = places.address(address)
    return Row(given.text, function, [len(numbers), int("trans" in given.modifiers), place, offset, *numbers])


def product(places: Places, given: Instruction) -> list[Row]:
    kind = next(kind for kind in MULTIPLIED if kind in given.modifiers)
    shape = "m16n8k8" if kind == "tf32" else "m16n8k16"
    expect(shape in given.modifiers and given.kind == "f32", f"{shape} with sums in fp32")
    own = [places.place(one, 32) for each in given.operands for one in several(each)]
    return [Row(given.text, "ptx_mma", [MULTIPLIED.index(kind), *own])]


def wide_product(places: Places, given: Instruction) -> list[Row]:
    """wgmma, its fence, its commit and its wait."""
    what = given.modifiers[0]
    if what in ("fence", "commit_group", "wait_group"):
        function = f"ptx_wgmma_{what.removesuffix('_group')}"
        return [Row(given.text, function, [int(str(one)) for one in given.operands])]
    shape = next(one for one in given.modifiers if one.startswith("m64n"))
    columns, depth = (int(part) for part in shape.removeprefix("m64n").split("k"))
    expect(depth == 16 and "f32" in given.modifiers, "16-bit numbers, with sums in fp32")
    to, a, b, counts, one, other, *turned = given.operands
    expect((one, other) == ("1", "1"), "factors of 1")
    is_own = isinstance(a, tuple)  # A is in registers, and has no way to be turned
    turns = [*([0] if is_own else []), *(int(str(each)) for each in turned), 0, 0]
    flags = is_own + 2 * turns[0] + 4 * turns[1] + 8 * (given.kind == "f16")
    descriptors = [0 if is_own else places.place(a, 64), places.place(b, 64)]
    own = [places.place(each, 32) for each in several(a)] if is_own else [0] * 4
    head = [columns, flags, places.place(counts, 1), *descriptors, *own]
    return [Row(given.text, "ptx_wgmma", head + [places.place(each, 32) for each in several(to)])]


UNITS: dict[str, Callable[[Places, Instruction], list[Row]]] = {
    "ld": load, "ldu": load, "st": store, "atom": atomic, "red": reduction, "bra": branch, "ret": end, "exit": end,
    "nanosleep": turn, "bar": barrier, "barrier": barrier, "shfl": shuffle, "vote": vote, "redux": reduce,
    "elect": elect, "activemask": active, "fence": fence, "cp": copy, "prefetch": prefetch, "ldmatrix": load_matrix,
    "stmatrix": store_matrix, "mma": product, "wgmma": wide_product,
}  # fmt: skip
