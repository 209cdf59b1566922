"""The machine's functions: those of machine/*.h, and one for each form of the instructions that compute.

g++ compiles the former once, and the latter as they are met. Both are kept in build/ptx, for all processes.
"""

import ctypes
import fcntl
import hashlib
import json
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ptx.meaning import FLOATS, HALVES, PAIRS
from ptx.places import Form

SOURCE = Path(__file__).parent / "machine"
BUILT = Path(__file__).parents[3] / "build" / "ptx"
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-shared",
    "-fPIC", "-w", f"-I{SOURCE}",
)  # fmt: skip


@cache
def _version(what: str) -> str:
    """The sources of all of the machine, or of its "registers" alone, in short; what others built is of no use."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCE.glob(f"{what}*")))
    return hashlib.sha256(text + Path(__file__).read_bytes()).hexdigest()[:12]


@contextmanager
def _alone(what: str = "") -> Iterator[Path]:
    """The folder of what was built of these sources, which one process at a time changes."""
    folder = BUILT / (what or "machine") / _version(what)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _build(source: str, target: Path) -> None:
    text = target.with_suffix(".cpp")
    text.write_text(source)
    made = target.with_suffix(".new")
    subprocess.run(["g++", *FLAGS, str(text), "-o", str(made)], check=True)
    made.rename(target)


@cache
def machine() -> ctypes.CDLL:
    """The library of the scheduler, of memory and of products."""
    with _alone() as folder:
        library = folder / "machine.so"
        if not library.exists():
            _build((SOURCE / "machine.cpp").read_text(), library)
    return ctypes.CDLL(str(library))


_known: dict[str, int] = {}  # addresses of functions, by what they are called


def addresses(functions: Iterable[Form | str]) -> dict[Form | str, int]:
    """The address of each function; builds those that are not there yet."""
    wanted = {function: name_of(function) for function in {*functions} if function}
    for function, name in wanted.items():
        if isinstance(function, str) and name not in _known:
            _known[name] = _address(machine(), name)
    missing = {name: function for function, name in wanted.items() if name not in _known}
    if missing:
        with _alone("registers") as folder:
            index = folder / "forms.json"
            built: dict[str, str] = json.loads(index.read_text()) if index.exists() else {}
            new = {name: form for name, form in missing.items() if name not in built and isinstance(form, Form)}
            if new:
                library = folder / f"forms-{len({*built.values()})}.so"
                code = "\n".join(code_of(form, name) for name, form in sorted(new.items()))
                _build(f'#include <limits>\n#include "registers.h"\n{code}', library)
                built |= dict.fromkeys(new, library.name)
                index.write_text(json.dumps(built, indent=0))
        libraries = {file: ctypes.CDLL(str(folder / file)) for file in {built[name] for name in missing}}
        _known.update({name: _address(libraries[built[name]], name) for name in missing})
    return {function: _known[name] for function, name in wanted.items()} | {"": 0}


def _address(library: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


def name_of(function: Form | str) -> str:
    return function if isinstance(function, str) else "form_" + hashlib.sha256(repr(function).encode()).hexdigest()[:16]


def code_of(form: Form, name: str) -> str:
    """The C++ of a form: for each lane that takes part, load the operands and store what the formula says."""
    each, (width, *widths) = form.meaning, form.widths
    letters = "abcdefgh"[: len(widths)]
    pointers = "".join(
        f"const auto p{letter} = " + ("*" * (bits == 1)) + f"r.reg<u{max(bits, 32 * (bits == 1))}>(o[{at + 1}]); "
        for at, (letter, bits) in enumerate(zip(letters, widths, strict=True))
    )

    def loads(half: int = 0) -> str:
        parts = zip(letters, each.sources, strict=True)
        return " ".join(f"{_loaded(letter, kind, half, each.flush)};" for letter, kind in parts)

    result = each.result if each.result[0] != "b" or each.result in (*HALVES, *PAIRS) else f"u{each.result[1:]}"
    if result == "pred":
        head, tail = "u32 out = 0;", "u32& D = *r.reg<u32>(o[0]); D = (D & ~mask) | out;"
        body = f"{loads()} out |= (u32)(bool)({each.formula}) << i;"
    elif result in PAIRS:
        head, tail = f"auto D = r.reg<u{width}>(o[0]);", ""
        half = [f"{{ {loads(at)} out |= (u32)to_{PAIRS[result]}({each.formula}).bits << {16 * at}; }}" for at in (0, 1)]
        body = f"u32 out = 0; {half[0]} {half[1]} D[i] = out;"
    else:
        head, tail = f"auto D = r.reg<u{width}>(o[0]);", ""
        value = f"to_{result}({each.formula})" if result in HALVES else f"({result})({each.formula})"
        value = f"ftz({value})" if each.flush and result == "f32" else value
        value = f"canonical({value})" if result in ("f32", "f64") else value
        body = f"{loads()} D[i] = raw<u{width}>({value});"
    text = f"{pointers}{head} EACH(mask, {body}) {tail}"
    return f'extern "C" void {name}(Registers& r, const s64* o, u32 mask) {{ {text} }}'


def _loaded(letter: str, kind: str, half: int, flush: bool) -> str:
    """The declaration of an operand's value in lane i."""
    if kind == "pred":
        return f"const bool {letter} = p{letter} >> i & 1"
    base, _, part = kind.partition(".")
    if base in PAIRS:
        return f"const f64 {letter} = wide({PAIRS[base]}{{(u16)(p{letter}[i] >> {16 * int(part or half)})}})"
    if base in HALVES:
        return f"const f64 {letter} = wide({base}{{(u16)p{letter}[i]}})"
    own = base if base in FLOATS or base[0] != "b" else f"u{base[1:]}"
    value = f"as<{own}>(p{letter}[i])"
    return f"const {own} {letter} = " + (f"ftz({value})" if flush and own == "f32" else value)
