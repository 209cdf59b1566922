"""Helpers of tests/kernels/test_native.py and its neighbours."""

import shutil

import pytest

from heavypath.kernels.native import library as native_library


def assert_fails_with(test, file, original, replacement, tmp_path, monkeypatch):
    """A test passes, and fails where one place of the C++ is another."""
    test()
    sources = shutil.copytree(native_library.SOURCES, tmp_path / "native")
    text = (sources / file).read_text(encoding="utf-8")
    assert text.count(original) == 1
    (sources / file).write_text(text.replace(original, replacement), encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_library, "SOURCES", sources)
    changed = native_library.library.__wrapped__()
    assert changed is not None
    monkeypatch.setattr(native_library, "library", lambda: changed)
    with pytest.raises(AssertionError):
        test()
