"""The package beside others: a foreign `kernels` stays importable, and a wheel holds everything."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
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


def test_the_kernels_folder_is_not_a_top_level_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_a_wheel_holds_all_modules_the_demo_pair_and_the_type_markers(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("kernels", "speculative"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", tmp_path, source], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("heavypath-*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    folders = ("kernels", "speculative")
    present = [path.relative_to(source) for folder in folders for path in source.glob(f"{folder}/**/*.*")]
    present = [path for path in present if path.suffix != ".md"]  # READMEs are for readers of the source
    assert shipped == {f"heavypath/{path.as_posix()}" for path in present}
    for folder in folders:
        assert f"heavypath/{folder}/py.typed" in shipped
    for model in ("target", "draft"):
        assert f"heavypath/speculative/demo/{model}/model.safetensors" in shipped
