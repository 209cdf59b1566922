"""The tool that `make mutants` runs: which mutants a text has, and which of them tests find."""

import sys
from pathlib import Path

import pytest
from mutant_runs import Runner
from mutants import chosen, mutants

SOURCE = '''"""A module."""


class Counter:
    def next(self, value: int | None = 1) -> int:
        """Add -1 or 1."""
        if value is None:
            raise ValueError("no 1 < 2")
        return max(value, 0) if value < 3 else step(value, by=2)


def step(value, *, by=1):
    value = value + by
    rows[value] = value
    return rows[value]
'''

TESTED = '''def clamped(value):
    """At most 10."""
    return 10 if value >= 10 else value


def unused(value):
    return value + 1
'''

TESTS = """from tiny_package.clamping import clamped


def test_values_are_clamped():
    assert [clamped(value) for value in (9, 10, 12)] == [9, 10, 10]
"""


def test_mutants_of_a_text_change_one_place_each():
    found = mutants("a.py", SOURCE)
    assert {(mutant.line, mutant.operator, mutant.replacement) for mutant in found} == {
        (7, "condition", "if not (value is None):"),
        (7, "compare", "if value is not None:"),
        (8, "drop", "pass"),
        (9, "condition", "return max(value, 0) if not (value < 3) else step(value, by=2)"),
        (9, "compare", "return max(value, 0) if value <= 3 else step(value, by=2)"),
        (9, "constant", "return max(value, 0) if value < 4 else step(value, by=2)"),
        (9, "constant", "return max(value, 0) if value < 2 else step(value, by=2)"),
        (9, "name", "return min(value, 0) if value < 3 else step(value, by=2)"),
        (9, "constant", "return max(value, 1) if value < 3 else step(value, by=2)"),
        (9, "constant", "return max(value, (-1)) if value < 3 else step(value, by=2)"),
        (9, "keyword", "return max(value, 0) if value < 3 else step(value)"),
        (9, "constant", "return max(value, 0) if value < 3 else step(value, by=3)"),
        (9, "constant", "return max(value, 0) if value < 3 else step(value, by=1)"),
        (13, "drop", "pass"),
        (13, "arithmetic", "value = value - by"),
        (14, "drop", "pass"),
        (15, "index", "return rows[value - 1]"),
    }
    assert {mutant.function for mutant in found} == {"Counter.next", "step"}
    assert all(mutant.applied(SOURCE).count("\n") == SOURCE.count("\n") for mutant in found)


def test_the_same_mutants_are_chosen_although_other_lines_change():
    few = chosen(mutants("a.py", SOURCE), SOURCE, 2)
    assert len(few) == 4
    longer = SOURCE.replace("def step", "OTHER = 3\n\n\ndef step")
    assert [mutant.key for mutant in chosen(mutants("a.py", longer), longer, 2)] == [mutant.key for mutant in few]


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_mutant_is_found_and_an_equivalent_one_survives(tmp_path: Path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code/__init__.py").touch()
    (tmp_path / "code/clamping.py").write_text(TESTED)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_clamping.py").write_text(TESTS)
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    runner = Runner(tmp_path, {"tiny_package": tmp_path / "code"}, jobs=2, environment=alone)
    [(_, tests)] = runner.measured(["test_clamping.py"])
    assert "code/clamping.py clamped" in tests[0].reached
    assert "code/clamping.py unused" not in tests[0].reached
    wanted = "return 11 if value >= 10 else value", "return 10 if value > 10 else value", "return value - 1"
    several = [mutant for mutant in mutants("code/clamping.py", TESTED) if mutant.replacement in wanted]
    results = {mutant.replacement: result for mutant, result in runner.results([(m, TESTED) for m in several], tests)}
    found, equivalent, untested = (results[replacement] for replacement in wanted)
    assert found.found_by == "test_clamping.py::test_values_are_clamped"
    assert (equivalent.found_by, equivalent.tests) == ("", 1)
    assert (untested.found_by, untested.tests) == ("", 0)
