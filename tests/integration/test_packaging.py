"""The package beside others: a foreign `kernels` stays importable, and a wheel holds everything."""

import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

from heavypath.speculative import demo

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FOREIGN_KERNELS = """\
from unittest.mock import MagicMock

def __getattr__(name):  # whatever transformers imports from it
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)
"""


def test_a_foreign_package_named_kernels_is_unharmed_in_the_repository_root(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(FOREIGN_KERNELS)
    metadata = tmp_path / "kernels-0.18.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n")
    program = "import kernels; print(kernels.__file__); from transformers import LlamaForCausalLM"
    command = [sys.executable, "-c", program]  # -c puts the current folder in front of PYTHONPATH
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == tmp_path / "kernels" / "__init__.py"
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """What a source distribution is made of."""
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, folder)
    for name in ("kernels", "speculative", "tests", "bench", "docs", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    return folder


def built(source, folder, **settings):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = os.environ | settings
    subprocess.run([*build, "--wheel-dir", folder, source], check=True, capture_output=True, env=environment)
    (found,) = folder.glob("heavypath-*.whl")
    return zipfile.ZipFile(found)


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return built(source, tmp_path_factory.mktemp("wheel"))


def test_a_wheel_can_do_without_the_weights_of_the_shipped_pair(source, wheel, tmp_path, monkeypatch):
    small = built(source, tmp_path, HEAVYPATH_DEMO="0")
    left_out = {*wheel.namelist()} - {*small.namelist()}
    weights = {f"heavypath/speculative/demo/{model}/model.safetensors" for model in ("target", "draft", "head")}
    assert left_out == weights | {"heavypath/speculative/demo/texts/smollm2.safetensors"}
    assert (tmp_path / small.filename).stat().st_size < 1.2e6
    monkeypatch.setattr("heavypath.speculative.demo.FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="built with HEAVYPATH_DEMO=0; install it without that"):
        demo._load_model("target", torch.float32, "cpu")


def test_a_wheel_holds_all_modules_the_demo_pair_and_the_type_markers(source, wheel):
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    folders = ("kernels", "speculative")
    present = [path.relative_to(source) for folder in folders for path in source.glob(f"{folder}/**/*.*")]
    itself = Path("speculative", "package", "__init__.py")
    expected = {f"heavypath/{path.as_posix()}" for path in present if path != itself}
    assert shipped == {"heavypath/__init__.py", *expected}
    for folder in folders:
        assert f"heavypath/{folder}/py.typed" in shipped
    for model in ("target", "draft"):
        assert f"heavypath/speculative/demo/{model}/model.safetensors" in shipped


def test_a_package_index_shows_where_the_project_is(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(wheel.read(name))
    home = dict(url.split(", ") for url in metadata.get_all("Project-URL"))["Repository"]
    assert "Programming Language :: Python :: 3.11" in metadata.get_all("Classifier")
    text = metadata.get_payload()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 8
    assert all(link.startswith(("https://", "#")) for link in links)
    assert f"({home}/raw/main/docs/images/pictures-step.svg)" in text
    assert f"({home}/blob/main/CHANGELOG.md)" in text


def test_the_tests_of_a_source_distribution_run(source, tmp_path):
    program = "import sys; from setuptools import build_meta; print(build_meta.build_sdist(sys.argv[1]))"
    build = [sys.executable, "-c", program, tmp_path]
    done = subprocess.run(build, cwd=source, check=True, capture_output=True, text=True)
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for folder in ("kernels", "speculative", "tests", "bench", "docs", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (unpacked / path.relative_to(ROOT)).is_file(), path
    assert all(
        (unpacked / name).is_file() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "mkdocs.yml")
    )
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/core/test_tree.py"]
    done = subprocess.run(run, cwd=unpacked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_everything_has_a_short_name_that_is_imported_late_and_commands_do_without_the_servers_packages():
    program = """
import sys
sys.modules.update(dict.fromkeys(("fastapi", "uvicorn", "prometheus_client", "openai")))  # of the server alone
import heavypath, heavypath.kernels.noise
assert "transformers" not in sys.modules
from heavypath import SpeculativeDecoder, __version__
import heavypath.speculative
assert SpeculativeDecoder is heavypath.speculative.SpeculativeDecoder
assert {*heavypath.speculative.__all__} < {*dir(heavypath)}
assert not hasattr(heavypath, "SpeculativeDecorder")
del SpeculativeDecoder
from heavypath import *
assert SpeculativeDecoder is heavypath.speculative.SpeculativeDecoder
from heavypath.speculative.cli.app import main
assert main(["info", "--help"]) == 0
print(__version__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == importlib.metadata.version("heavypath")
