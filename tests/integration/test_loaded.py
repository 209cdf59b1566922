"""What a user loads and a reader enters, as `python bench/loaded.py` measures it. The limits may only fall."""

import pytest
from bench_scripts import script

pytestmark = pytest.mark.integration


def test_a_user_loads_no_more_than_today():
    loaded = script("loaded")
    size = loaded.size_of(loaded.files_of(loaded.LOAD))
    assert size.files <= 109, size
    assert size.lines <= 17_300, size


def test_a_reader_enters_no_more_than_today():
    loaded = script("loaded")
    size = loaded.size_of(loaded.files_of(loaded.ENTER))
    assert size.files <= 51, size
    assert size.density <= 11.2, size
