"""Every pair of options decodes right: rows of a covering array, each against transformers, itself and its law."""

import math
from datetime import date

import pytest
from conformance_parts import BATCHES, Case
from conformance_rows import LLAMAS, SHARE, TOYS, at_random, covering, name_of
from conformance_texts import by_transformers, greedy_gaps, law_of, sampled, texts

from heavypath.kernels import step_kernels
from heavypath.speculative import METHODS, goodness_of_fit

FEW, MANY = 2_500, 20_000  # texts whose law is looked at by default, and nightly
TIES = {"bfloat16": 0.3, "float16": 0.05}  # logits closer than this may swap between two exact programs


def pytest_generate_tests(metafunc):
    """Rows by the option --rows; those whose steps the interpreter runs as graphs take long.

    Of the pairs, the first rows hold most; the others run nightly, as slow tests do.
    """
    if "row" not in metafunc.fixturenames:
        return
    which = metafunc.config.getoption("--rows")
    rows = (
        at_random(300, date.today().toordinal())
        if which == "today"
        else covering(3)
        if which == "triples"
        else covering()
    )
    rows = {name_of(row): row for row in rows if row["way"] != "ranks"}
    some = which == "pairs" and not metafunc.config.getoption("--every-variant")
    usual = {name_of(row) for row in covering()[: len(covering()) // SHARE]} if some else {*rows}
    if metafunc.function is test_the_joint_law_of_four_tokens:
        parametrize_laws(metafunc, rows, usual, some)
        return
    usual -= {name for name, row in rows.items() if row["way"] == "graph"}
    metafunc.parametrize("row", [
        pytest.param(row, id=name, marks=[] if name in usual else [pytest.mark.slow]) for name, row in rows.items()
    ])  # fmt: skip


def parametrize_laws(metafunc, rows, usual, some):
    """Rows whose law is enumerated; by default fewer texts of the usual rows, and of each way to verify trees."""
    rows = {name: row for name, row in rows.items() if row["target"] in TOYS and METHODS[row["method"]].is_lossless}
    every = [pytest.param(row, MANY, id=name, marks=[pytest.mark.slow] if some else []) for name, row in rows.items()]
    ways = {*{(row["method"], row["verifier"]): name for name, row in reversed(rows.items())}.values()}
    few = [pytest.param(rows[name], FEW, id=f"{name}, few") for name in rows if some and name in usual | ways]
    metafunc.parametrize(("row", "sequences"), few + every)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def enter(request, monkeypatch):
    """A function that makes the surroundings of a row's way."""

    def entered(row):
        if row["way"] == "reference":
            for place in ("kernels.implementation", "speculative.models.linear"):
                monkeypatch.setattr(f"heavypath.{place}.library", lambda: None)
            monkeypatch.setitem(step_kernels._CHOSEN, "cpu", step_kernels.StepKernels("torch"))
        if row["way"] == "graph":
            request.getfixturevalue("as_on_a_gpu")()

    return entered


@pytest.mark.budget(math.inf)
def test_texts(row, enter, folder):
    case, everyone = Case(row, folder), range(len(BATCHES[row["batch"]]))
    exact, greedy = row["dtype"] == "float32", row["temperature"] == 0
    keeps_text = row["method"] == "ersd" and row["verifier"] != "own"  # which is compared with plain decoding instead
    if exact and not greedy and not keeps_text and comparable(row) and (row["way"] != "compiled" or row["past"]):
        plain = texts(case, case.decoder(), way="compiled", past=False)
    else:
        plain = None  # nothing to be compared, or transformers' own text
    enter(row)
    decoder = case.decoder(**({"cuda_graphs": True} if row["way"] == "graph" else {}))
    found = texts(case, decoder)
    alone = exact and not follows_batch(row) and len(everyone) > 1 and row["way"] not in ("custom_generate", "graph")
    # In 16 bits a service's texts depend on which requests share a step; sampled ones, on what has been learned.
    if alone:
        for place in {everyone[0], everyone[-1]}:
            assert found[place] == texts(case, decoder, only=place)[0]
    elif not learns(row) and (exact or row["way"] != "served"):
        assert texts(case, decoder) == found  # under the same seed
    if row["way"] == "graph" and row["target"] in LLAMAS and "own" not in (row["verifier"], row["draft"]):
        assert len(decoder.runner.idle.launcher.graphs) > 0
    if not exact:
        for place in everyone if greedy else []:
            assert float(greedy_gaps(case, place, found[place]).max()) < TIES[row["dtype"]]
        return
    assert plain in (None, found)
    if greedy:
        assert found == [by_transformers(case, place) for place in everyone]
    if keeps_text:
        assert found == texts(case, case.plain_decoder(), way="compiled", past=False)


@pytest.mark.budget(math.inf)
def test_the_joint_law_of_four_tokens(row, sequences, folder):
    """All are sampled in one batch, by compiled code: `test_texts` holds other ways to its texts under each seed."""
    case = Case(row | {"way": "compiled"}, folder)
    fit = goodness_of_fit(sampled(case, case.decoder(), sequences), law_of(case))
    assert fit.is_lossless(), str(fit)


def follows_batch(row):
    """Whether a sampled text is another sample of the same law in another batch.

    By a profile it is, and after texts that were learned. So it is where one sequence has processors and another none:
    then a penalty is told to the draft, and alone it is not. The default trees of toys are the same for any batch, but
    streamed targets are no toys: on some CPUs the tree of one sequence does not pay for two.
    """
    told = row["processors"] == "by sequence" and row["rule"] != "none"
    estimated = row["way"] == "streamed" and row["tree"] == "default"
    by_batch = row["tree"] in ("by batch", "replanned") or told or estimated
    return learns(row) or (by_batch and row["temperature"] > 0 and row["method"] != "ersd")


def learns(row):
    """Whether a sampled text is another sample of the same law after other texts."""
    keeps_text = row["method"] == "ersd" and row["verifier"] != "own"
    return row["draft"] == "recall" and row["temperature"] > 0 and not keeps_text


def comparable(row):
    """Whether a text is that of plain `generate`: a service samples by its own noise, but for races."""
    alike = row["method"] in ("ersd", "autoregressive") and row["verifier"] != "own"
    return alike or (row["way"] != "served" and not learns(row))
