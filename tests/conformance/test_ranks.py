"""Rows of the conformance suite that two processes decode together: their texts are those of one."""

import pytest
from conformance_parts import Case
from conformance_ranks import texts_of
from conformance_rows import covering
from conformance_texts import texts
from rank_processes import on_ranks


@pytest.mark.integration
def test_two_ranks_write_the_texts_of_one(tmp_path):
    rows = [row for row in covering() if row["way"] == "ranks"]
    assert len({row["draft"] for row in rows}) > 9
    for row in {row["target"]: row for row in rows}.values():
        Case(row).target.save_pretrained(tmp_path / row["target"])
    expected = []
    for row in rows:
        case = Case(row)
        expected.append(texts(case, case.decoder(), way="compiled"))
    assert on_ranks(2, texts_of, tmp_path, rows) == [expected, expected]
