"""Where compiled kernels are kept: nobody else's code is loaded, nothing broken is, and the log says what is wrong."""

import ctypes
import errno
import hashlib
import logging
import os
import re
import subprocess

import pytest

from heavypath.kernels.native import library as native_library
from heavypath.kernels.native.library import library

if library() is None:
    pytest.skip("needs a C++ compiler", allow_module_level=True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A safe cache with a small library in it; its file's path, from which nothing has been loaded yet."""
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int answer() { return 1; }\n')
    monkeypatch.setattr(native_library, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "made"))
    assert load() == 1
    (tmp_path / "made").rename(tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (kept,) = (tmp_path / "cache" / "heavypath").iterdir()
    return kept


def load():
    """What the library's function returns: 1 of the right one, 2 of one that somebody else wrote."""
    return library.__wrapped__().answer()


def put(cache, code):
    """Another file in the place of one that may be loaded."""
    cache.unlink()
    cache.write_bytes(code)


@pytest.fixture
def planted(tmp_path):
    """The bytes of somebody else's library, with the right digest, and the file that it writes if it is loaded."""
    mark = tmp_path / "ran"
    source = (
        '#include <cstdio>\nextern "C" int answer() { return 2; }\n'
        f'__attribute__((constructor)) static void run() {{ fclose(fopen("{mark}", "w")); }}\n'
    )
    (tmp_path / "planted.cpp").write_text(source)
    made = tmp_path / "planted.so"
    subprocess.run(["g++", "-shared", "-fPIC", tmp_path / "planted.cpp", "-o", made], check=True)
    code = made.read_bytes()
    return code + hashlib.sha256(code).digest(), mark


def give_away(path, how, monkeypatch):
    """Let somebody else write a file or a folder: by its mode, as a link, or as its owner."""
    if how == "link":
        path.rename(path.parent.parent / "elsewhere")
        path.symlink_to(path.parent.parent / "elsewhere")
    elif how == "owner":
        real, taken = os.fstat, os.stat(path).st_ino

        def fstat(file):
            facts = real(file)
            return os.stat_result((*facts[:4], 65534, *facts[5:])) if facts.st_ino == taken else facts

        monkeypatch.setattr(os, "fstat", fstat)
    else:
        path.chmod(how)


def test_it_is_compiled_once_and_found_again(cache, caplog):
    with caplog.at_level(logging.INFO):
        assert load() == 1
        assert not caplog.records
        cache.unlink()
        assert load() == 1
        assert "compiling kernels for this CPU, once" in caplog.text
    assert [*cache.parent.iterdir()] == [cache]
    assert cache.suffix == ".so"


@pytest.mark.parametrize("how", [0o1777, 0o775, 0o720, "link", "owner"])
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_somebody_else_could_write_is_not_loaded(what, how, cache, planted, monkeypatch, caplog):
    """A file is compiled anew in its place; into a folder nothing is put."""
    code, mark = planted
    put(cache, code)
    with monkeypatch.context() as context:
        give_away(cache if what == "file" else cache.parent, how, context)
        assert load() == 1
    assert not mark.exists()
    if what == "file":
        assert f"{cache} is compiled anew" in caplog.text
        assert load() == 1
        assert not cache.is_symlink()
        assert cache.stat().st_mode & 0o777 == 0o600
        return
    assert cache.read_bytes() == code
    for said in ("compiled for this process alone", "heavypath'", "set XDG_CACHE_HOME"):
        assert said in caplog.text
    if how != "link":
        cache.parent.chmod(0o700)
        assert load() == 2, "it would have run"


def test_a_file_that_is_swapped_after_the_check_is_not_loaded(cache, planted, monkeypatch):
    code, mark = planted
    real = ctypes.CDLL

    def late(name):
        put(cache, code)
        return real(name)

    monkeypatch.setattr(ctypes, "CDLL", late)
    assert load() == 1
    assert not mark.exists()


@pytest.mark.parametrize("change", [lambda whole: b"", lambda whole: whole[:-5], lambda whole: bytes(len(whole))])
def test_a_file_that_is_cut_or_garbage_is_compiled_anew(change, cache, caplog):
    put(cache, change(cache.read_bytes()))
    assert load() == 1
    assert f"{cache} is compiled anew: it was cut off or changed" in caplog.text
    assert "cannot compile" not in caplog.text


def test_where_nothing_can_be_kept_the_kernels_are_compiled_all_the_same(cache, monkeypatch, caplog, tmp_path):
    def full(file):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache.unlink()
    cache.mkdir()
    (cache / "file").touch()
    assert load() == 1
    assert "Is a directory" in caplog.text
    (cache / "file").unlink()
    cache.rmdir()
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", full)
        assert load() == 1
    assert "cannot be kept: [Errno 28] No space left on device" in caplog.text
    assert [*cache.parent.iterdir()] == [], "nothing is left of it"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert load() == 1
    assert "Not a directory" in caplog.text
    assert "cannot compile" not in caplog.text


def test_a_file_is_on_the_disk_before_it_has_its_name(cache, monkeypatch):
    cache.unlink()
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *names, **options: (done.append("replace"), replace(*names, **options)))
    assert load() == 1
    assert done == ["fsync", "replace"]


def test_what_cannot_be_loaded_is_not_blamed_on_the_compiler(cache, caplog):
    code = b"no library"
    put(cache, code + hashlib.sha256(code).digest())
    assert library.__wrapped__() is None
    assert "cannot be loaded" in caplog.text
    assert "cannot compile" not in caplog.text


def test_a_compiler_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch, caplog):
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)
    monkeypatch.setenv("CXX", str(silent))
    monkeypatch.setattr(native_library, "PATIENCE", 0.2, raising=False)
    assert library.__wrapped__() is None
    (record,) = caplog.records
    assert "timed out after 0.2 seconds" in record.getMessage()
    assert str(silent) in record.getMessage()


CPUINFO = "model name\t: any\nflags\t\t: fpu {}\n"
UPTO = {"x86-64-v2": 1, "x86-64-v3": 2, "x86-64-v4": 3}


@pytest.fixture
def processor(tmp_path, monkeypatch):
    """Plays an x86 processor that knows the first levels of x86-64 above the lowest, so many of them."""

    def play(levels):
        (tmp_path / "cpuinfo").write_text(CPUINFO.format(" ".join([*native_library.LEVELS.values()][:levels])))
        monkeypatch.setattr(native_library, "CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(native_library.platform, "machine", lambda: "x86_64")

    return play


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_a_processor_is_compiled_for_as_far_as_it_goes_and_no_further(levels, processor, monkeypatch):
    processor(levels)
    for name, place in UPTO.items():
        monkeypatch.setenv("HEAVYPATH_MARCH", name)
        if place <= levels:
            assert native_library.flags()[0] == f"-march={name}"
        else:
            with pytest.raises(ValueError, match=rf"HEAVYPATH_MARCH={name}: this processor .* lacks .*name a lesser"):
                library.__wrapped__()


@pytest.mark.parametrize(("given", "machine", "message"), [
    ("avx2", "x86_64", "must be native, x86-64-v2, x86-64-v3, x86-64-v4, or not set, got 'avx2'"),
    ("X86-64-V3", "x86_64", "or not set, got 'X86-64-V3'"),
    ("x86-64-v3", "aarch64", r"this processor \(aarch64\) lacks"),
])  # fmt: skip
def test_a_processor_that_cannot_be_compiled_for_is_refused(given, machine, message, monkeypatch):
    monkeypatch.setattr(native_library.platform, "machine", lambda: machine)
    monkeypatch.setenv("HEAVYPATH_MARCH", given)
    with pytest.raises(ValueError, match=message):
        library.__wrapped__()


def test_libraries_for_several_processors_are_kept_side_by_side(processor, monkeypatch):
    processor(3)
    names = []
    for given in ("native", "x86-64-v2", "x86-64-v3", "x86-64-v4"):
        monkeypatch.setenv("HEAVYPATH_MARCH", given)
        names.append(native_library.library_name(native_library.compiler_path()))
    monkeypatch.delenv("HEAVYPATH_MARCH")
    assert native_library.library_name(native_library.compiler_path()) == names[0]
    assert len({*names}) == 4


@pytest.mark.skipif(native_library.platform.machine() != "x86_64", reason="levels of x86-64")
def test_the_compiled_code_says_what_it_was_compiled_for():
    given = os.environ.get("HEAVYPATH_MARCH", "native")
    words = re.fullmatch(r"(x86-64(?:-v[234])?), (128|256|512)-bit vectors(, AMX)?", native_library.compiled_for())
    assert words, native_library.compiled_for()
    assert given in ("native", words[1])
    assert {"x86-64-v4": "512", "x86-64-v3": "256"}.get(words[1], "128") == words[2]
