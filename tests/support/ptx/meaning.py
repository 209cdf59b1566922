"""Meanings of the PTX instructions that compute, each lane for itself: a formula in C++ of the operands a, b, c and d.

The source is NVIDIA's "Parallel Thread Execution ISA", section 9.7. Numbers of 16 bits are computed in fp64 and rounded
once. What PTX calls approximate is off by as much as PTX allows, by chance (`near` in machine/registers.h).
"""

import re
from typing import NamedTuple

from ptx.parse import BITS, Instruction

HALVES = ("f16", "bf16")
PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
FLOATS = ("f32", "f64", *HALVES)


class Meaning(NamedTuple):
    """A result of a type, by a formula of operands of some types. "pred" is a condition.

    The operands of a result of two halves, such as bf16x2, are the halves of theirs, which the formula meets in turn.
    flush: whether numbers of fp32 that are below the normal ones count as 0
    """

    result: str
    sources: tuple[str, ...]
    formula: str
    flush: bool = False


OF_FLOATS = {
    "add": "a + b", "sub": "a - b", "mul": "a * b", "fma": "std::fma(a, b, c)", "mad": "std::fma(a, b, c)",
    "min": "low(a, b)", "max": "high(a, b)", "neg": "-a", "abs": "std::fabs(a)", "sqrt": "std::sqrt(a)",
    "div": "a / b", "rcp": "1 / a", "copysign": "std::copysign(b, a)",
}  # fmt: skip
APPROXIMATE = {  # in fp64, and the units in the last place that the result may be off
    "ex2": ("std::exp2((f64)a)", 2), "rcp": ("1 / (f64)a", 1), "rsqrt": ("1 / std::sqrt((f64)a)", 1),
    "sqrt": ("std::sqrt((f64)a)", 1), "div": ("(f64)a / b", 2), "sin": ("std::sin((f64)a)", 2),
    "cos": ("std::cos((f64)a)", 2), "tanh": ("std::tanh((f64)a)", 4096),
}  # fmt: skip
OF_INTEGERS = {  # T is the type, U the same without sign, W twice as wide; BITS how wide
    "add": "(U)a + (U)b", "sub": "(U)a - (U)b", "neg": "0 - (U)a", "abs": "a < 0 ? 0 - (U)a : (U)a",
    "mul.lo": "(u64)(U)a * (u64)(U)b", "mad.lo": "(u64)(U)a * (u64)(U)b + (u64)(U)c",
    "mul.hi": "(W)a * (W)b >> BITS", "mad.hi": "(U)((W)a * (W)b >> BITS) + (U)c",
    "div": "b == 0 ? -1 : b == (T)-1 && (T)-1 < 0 ? 0 - (U)a : (U)(a / b)",
    "rem": "b == 0 ? a : b == (T)-1 && (T)-1 < 0 ? 0 : a % b",
    "min": "a < b ? a : b", "max": "a > b ? a : b", "and": "a & b", "or": "a | b", "xor": "a ^ b", "not": "~a",
    "cnot": "a == 0", "popc": "__builtin_popcountll(a)",
    "clz": "a == 0 ? BITS : __builtin_clzll(a) - (64 - BITS)", "brev": "reversed<U>(a)",
    "lop3": "looked_up(a, b, c, d)", "prmt": "permuted(a, b, c)",
    "bfi": "inserted<U>(a, b, (u32)c, (u32)d)", "bfe": "field<U>(a, (u32)b, (u32)c, (T)-1 < 0)",
    "shl": "b >= BITS ? 0 : a << b", "shr": "b >= BITS ? ((T)-1 < 0 && a < 0 ? -1 : 0) : a >> b",
    "shf.l.wrap": "((u64)b << 32 | a) << (c & 31) >> 32", "shf.r.wrap": "((u64)b << 32 | a) >> (c & 31)",
    "shf.l.clamp": "((u64)b << 32 | a) << (c < 32 ? c : 32) >> 32",
    "shf.r.clamp": "((u64)b << 32 | a) >> (c < 32 ? c : 32)",
}  # fmt: skip
WAYS = ("lo", "hi", "wide", "l", "r", "wrap", "clamp")  # modifiers that say which of several results is meant
COUNTS = {"popc", "clz"}  # their results are u32
OTHER_SOURCES = {"shl": (1,), "shr": (1,), "bfe": (1, 2), "bfi": (2, 3)}  # operands that are u32 whatever the type
COMPARISONS = {
    "eq": "a == b", "ne": "a != b", "lt": "a < b", "le": "a <= b", "gt": "a > b", "ge": "a >= b",
    "lo": "a < b", "ls": "a <= b", "hi": "a > b", "hs": "a >= b",
}  # fmt: skip
JOINED = {"and": "&&", "or": "||", "xor": "!="}
OF_CONDITIONS = {"and": "a & b", "or": "a | b", "xor": "a ^ b", "not": "!a", "mov": "a"}
TESTS = {"finite": "std::isfinite(a)", "infinite": "std::isinf(a)", "number": "a == a", "notanumber": "a != a"}
ROUNDED = {"rni": "std::rint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}


def meaning(given: Instruction) -> list[Meaning] | None:
    """The meaning of each result of an instruction; None for what no formula says."""
    name, kind, count = given.name, given.kind, len(given.operands) - 1
    flush, bits = "ftz" in given.modifiers, f"b{BITS.get(kind, 0)}"
    if name in ("mov", "cvta") and kind != "pred":
        return _moves(given, bits)
    if name == "setp":
        return _comparisons(given, flush)
    if name == "cvt":
        return [_conversion(given, flush)]
    if name == "selp":
        return [Meaning(bits, (bits, bits, "pred"), "c ? a : b")]
    if name == "testp":
        return [Meaning("pred", (kind,), TESTS[given.modifiers[0]])]
    if name == "createpolicy":  # says what to keep in a cache
        return [Meaning("b64", (), "0")]
    if kind == "pred":
        formula = OF_CONDITIONS.get(name)
    elif kind in FLOATS or kind in PAIRS:
        formula = _of_floats(given)
    elif kind:
        return _of_integers(given, kind, count)
    else:
        return None
    return None if formula is None else [Meaning(kind, (kind,) * count, formula, flush=flush)]


def _of_floats(given: Instruction) -> str | None:
    name, modifiers, in_halves = given.name, given.modifiers, given.kind not in ("f32", "f64")
    if {"rz", "rm", "rp", "relu"}.intersection(modifiers):
        return None
    if name == "lg2":
        formula = "near_lg2(a, r.salt)"
    elif name in APPROXIMATE and (in_halves or {"approx", "full"}.intersection(modifiers)):
        exact, ulps = APPROXIMATE[name]
        operands = "raw<u32>(a) ^ 31 * raw<u32>(b)" if name == "div" else "raw<u32>((f32)a)"
        formula = exact if in_halves else f"near({exact}, {ulps}, {operands}, r.salt)"
    elif name in OF_FLOATS:
        formula = OF_FLOATS[name]
        if len(given.operands) == 4 and name in ("min", "max"):
            formula = formula.replace("a, b", f"{formula}, c")
        if "NaN" in modifiers:
            nan = " || ".join(f"{letter} != {letter}" for letter in "abc"[: len(given.operands) - 1])
            formula = f"{nan} ? NAN : {formula}"
    else:
        return None
    return f"std::fmin(std::fmax({formula}, 0), 1)" if "sat" in modifiers else formula


def _of_integers(given: Instruction, kind: str, count: int) -> list[Meaning] | None:
    name, modifiers = given.name, [one for one in given.modifiers if one in WAYS]
    key = ".".join((name, *modifiers))
    own = kind if kind[0] != "b" else f"u{BITS[kind]}"
    if "wide" in modifiers:
        wide = f"{own[0]}{2 * BITS[kind]}"
        product = f"({wide})a * ({wide})b" + (" + c" if name == "mad" else "")
        return [Meaning(wide, (own, own, wide)[:count], product)]
    if key not in OF_INTEGERS:
        return None
    twice = f"{own[0]}{2 * BITS[kind]}" if BITS[kind] < 64 else "__int128" if own[0] == "s" else "unsigned __int128"
    parts = {"T": own, "U": f"u{BITS[kind]}", "W": twice, "BITS": str(BITS[kind])}
    formula = re.sub(r"\w+", lambda found: parts.get(found[0], found[0]), OF_INTEGERS[key])
    sources = tuple("u32" if at in OTHER_SOURCES.get(name, ()) else own for at in range(count))
    return [Meaning("u32" if name in COUNTS else own, sources, formula)]


def _moves(given: Instruction, bits: str) -> list[Meaning]:
    """A copy, several registers as one, or one as several, lowest bits first."""
    results, source = given.operands
    if isinstance(source, tuple):
        part = BITS[bits] // len(source)
        letters, wide = "abcdefgh"[: len(source)], bits.replace("b", "u")
        joined = " | ".join(f"({wide}){name} << {part * at}" for at, name in enumerate(letters))
        return [Meaning(bits, (f"b{part}",) * len(source), joined)]
    if isinstance(results, tuple):
        part = BITS[bits] // len(results)
        return [Meaning(f"b{part}", (bits,), f"a >> {part * at}") for at in range(len(results))]
    return [Meaning(bits, (bits,), "a")]


def _comparisons(given: Instruction, flush: bool) -> list[Meaning]:
    """Of a comparison, or of one joined with another condition: that it holds, and that it does not hold."""
    (how, *others), kind = given.modifiers, given.kind
    count = len(str(given.operands[0]).split("|"))
    unordered = len(how) > 2 and how.endswith("u")
    if how in ("num", "nan"):
        formula = "a == a && b == b" if how == "num" else "a != a || b != b"
    elif kind in FLOATS or kind in PAIRS:
        formula = COMPARISONS[how.removesuffix("u")] if unordered or how in COMPARISONS else ""
        nan = "a != a || b != b"
        formula = f"{nan} || {formula}" if unordered else f"!({nan}) && {formula}"
    else:
        formula = COMPARISONS[how]
    join = next((JOINED[one] for one in others if one in JOINED), "")
    third = ("pred",) if join else ()
    tail = f" {join} c" if join else ""
    if kind in PAIRS:
        halves = [f"{kind}.{half}" for half in range(count)]
        return [Meaning("pred", (half, half, *third), f"({formula}){tail}") for half in halves]
    sources = (kind, kind, *third)
    both = [f"({formula}){tail}", f"!({formula}){tail}"][:count]
    return [Meaning("pred", sources, one, flush=flush) for one in both]


def _conversion(given: Instruction, flush: bool) -> Meaning:
    """From one type to another; two numbers of fp32 may become two halves side by side."""
    if "tf32" in given.modifiers:
        return Meaning("b32", ("f32",), "to_tf32(a)", flush=flush)
    if "e4m3x2" in given.modifiers:  # to f16x2, exactly
        return Meaning("b32", ("b16",), "(u32)to_f16(from_e4m3(a >> 8)).bits << 16 | to_f16(from_e4m3(a)).bits")
    to, source = [one for one in given.modifiers if one in BITS]
    if to in PAIRS:
        half = PAIRS[to]
        return Meaning("b32", (source, source), f"(u32)to_{half}(a).bits << 16 | to_{half}(b).bits", flush=flush)
    rounding = next((ROUNDED[one] for one in given.modifiers if one in ROUNDED), "")
    if source not in FLOATS and to not in FLOATS and "sat" in given.modifiers:
        raise NotImplementedError(given.text)
    if source in FLOATS and to not in FLOATS:
        bits = BITS[to]
        least, most = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if to[0] == "s" else (0.0, 2.0**bits)
        formula = f"whole<{to}>({rounding}((f64)a), {least}, {most})"
    elif source in FLOATS or to in FLOATS:
        formula = f"{rounding}(a)" if rounding else "a"
        if "sat" in given.modifiers:
            formula = f"std::fmin(std::fmax({formula}, 0.0f), 1.0f)"
    else:
        formula = "a"
    return Meaning(to, (source,), formula, flush=flush)
