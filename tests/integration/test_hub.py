"""The kernel repository for the Hub: it is kernels/ and nothing else, and Hugging Face's `kernels` loads it.

`make try-hub` runs all of it, and installs `kernels` for that.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "heavypath/heavypath"
pytestmark = pytest.mark.integration
with_kernels = pytest.mark.skipif(
    getattr(importlib.util.find_spec("kernels"), "origin", None) is None, reason="`make try-hub` installs kernels"
)


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "bench" / "hub" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    generator().generate(folder)
    return folder


class _WithoutImports(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Leave it out."""


def functions(path: Path) -> dict[tuple[str, int], list[str]]:
    """The statements of functions and methods, by name and how many stand before it; without imports, docstrings."""
    found, body = {}, ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9)).body
    for node in [inner for each in body for inner in (each.body if isinstance(each, ast.ClassDef) else [each])]:
        if isinstance(node, ast.FunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            found[node.name, len(found)] = [ast.unparse(each) for each in map(_WithoutImports().visit, body) if each]
    return found


def test_the_repository_is_the_kernels_and_nothing_is_written_twice(hub):
    files, package, left_out, taken = ROOT / "bench/hub/files", hub / "torch-ext" / "heavypath", set(), []
    own = {path.relative_to(files / "torch-ext" / "heavypath") for path in files.glob("torch-ext/**/*.py")}
    assert own == {Path("__init__.py"), Path("layers/__init__.py")}
    inner = {path.relative_to(package) for path in package.rglob("*.py")} - own
    sources = {path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.py")} - own
    assert inner == {path for path in sources if path.parts[0] != "native"} | {Path("native.py")}
    for path in inner & sources:
        ours, theirs = functions(ROOT / "kernels" / path), functions(package / path)
        assert ours.keys() == theirs.keys()
        taken += [body for body in ours.values() if len(body) > 2]
        for name, body in theirs.items():
            if body != ours[name]:
                assert len(body) == 1, f"{path}: {name}"
                assert body[0].startswith("raise NotImplementedError(" if "check" not in name[0] else "return None")
                left_out.add(f"{path}:{name[0]}")
    assert {"verification.py:reference", "sampling.py:reference", "nodes.py:check_values"} < left_out
    assert not {"verification.py:verify_tree", "sampling.py:gumbel_topk", "verifying/launches.py:verify"} & left_out
    written = [body for path in files.rglob("*.py") for body in functions(path).values()]
    assert not [body for body in written if body in taken]


def test_the_repository_imports_what_the_hub_allows(hub):
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path in (hub / "torch-ext").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert {name.split(".")[0] for name in names} <= allowed, path
            if isinstance(node, ast.FunctionDef) and "jit" not in "".join(map(ast.unparse, node.decorator_list)):
                assert "np." not in "".join(map(ast.unparse, node.body)), f"{path}: {node.name}"


DECIDED = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
import torch

spec = spec_from_file_location("by_path", sys.argv[1])
ours = sys.modules["by_path"] = module_from_spec(spec)
spec.loader.exec_module(ours)
logits = torch.tensor([[0.0, 3, 1, 2], [5, 4, 0, 6]])
assert ours.gumbel_topk(logits, 2, temperature=0.0, impl="triton").tokens.tolist() == [[1, 3], [3, 0]]
tokens, parents = torch.tensor([[0, 2, 1, 3]]), torch.tensor([-1, 0, 0, 2])  # a chain of 1, 3 beside a leaf of 2
likeliest = torch.nn.functional.one_hot(torch.tensor([[1, 0, 3, 2]]), 4).float()  # after each node
verified = ours.verify_tree(tokens, parents, likeliest, None, method="greedy", temperature=0.0, impl="triton")
assert (verified.path.tolist(), verified.next_token.tolist()) == ([[0, 2, 3]], [2])
certain, even = 100 * likeliest, torch.zeros(1, 4, 4)
for method in ("without_replacement", "traversal"):
    verified = ours.verify_tree(tokens, parents, certain, even, method=method, impl="triton")
    assert (verified.path.tolist(), verified.next_token.tolist()) == ([[0, 2, 3]], [2]), method
assert not [name for name in sys.modules if name.split(".")[0] == "heavypath"]
"""


def test_what_the_repository_draws_and_accepts(hub):
    run(hub, sys.executable, "-c", DECIDED, hub / "build" / "torch-cpu" / "__init__.py")


TRIED = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
import kernels, torch
from kernels._rust import Digest, Metadata
from kernels import LocalLayerRepository, Mode, kernelize, use_kernel_mapping
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as llama

path = Path(sys.argv[1])
ours = kernels.get_local_kernel(path)
other = kernels.get_local_kernel(Path(sys.argv[2]))
by_name = kernels.get_kernel("heavypath/heavypath", version=0, trust_remote_code=True)
assert by_name is ours and other is not ours
for variant in (path / "build").iterdir():  # the digests are those that `kernels verify-signature` compares
    metadata = Metadata.read_from_file(variant / "metadata.json")
    metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, variant))
    spec = spec_from_file_location("by_name", variant / "heavypath" / "__init__.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.tree_attention.__module__.startswith(metadata.id)
x, y = torch.randn(2, 3, 8)
names = set()
def backend(graph, _):
    names.update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
    return graph.forward
for kernel in (ours, other):
    torch._dynamo.reset()
    both = torch.compile(lambda x, y: kernel.silu_product(x, y), backend=backend, fullgraph=True)
    assert torch.equal(both(x, y), torch.nn.functional.silu(x) * y)
assert len(names) == 2 and all(name.startswith("_heavypath_cpu_") for name in names), names

kernels.replace_kernel_forward_from_hub(llama.LlamaRMSNorm, "RMSNorm")
kernels.replace_kernel_forward_from_hub(llama.LlamaMLP, "SiluProductMLP")
rotary = llama.apply_rotary_pos_emb = kernels.use_kernel_forward_from_hub("rotary_pos_emb")(llama.apply_rotary_pos_emb)
kernels.use_kernelized_func(rotary)(llama.LlamaAttention)
layers = {"RMSNorm": "RMSNorm", "SiluProductMLP": "SiluProductMLP", "rotary_pos_emb": "RotaryPosEmb"}
mapping = {name: {"cpu": LocalLayerRepository(repo_path=path, layer_name=layer)} for name, layer in layers.items()}
torch.manual_seed(1)
config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16)
model = LlamaForCausalLM(config).eval()
ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
with torch.no_grad():
    expected = model(ids).logits
    for mode in (Mode.INFERENCE, Mode.INFERENCE | Mode.TORCH_COMPILE):
        with use_kernel_mapping(mapping, inherit_mapping=False):
            kernelize(model, mode=mode, device="cpu", use_fallback=False)
        for name in ("RMSNorm", "SiluProductMLP"):
            module = {"RMSNorm": model.model.norm, "SiluProductMLP": model.model.layers[0].mlp}[name]
            assert module.forward.__func__ is getattr(ours.layers, name).forward
        assert rotary.forward.__func__ is ours.layers.RotaryPosEmb.forward
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-4)
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(ids).logits, expected, atol=1e-5, rtol=1e-4)
print("same logits")
"""


def run(hub, *command, **more):
    known = {"LOCAL_KERNELS": f"{NAME}={hub}", "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=hub, env=os.environ | known | more, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@with_kernels
def test_kernels_loads_two_versions_and_kernelizes_a_model(hub, tmp_path):
    other = generator()
    other.NATIVE += "# another version\n"
    other.generate(tmp_path)
    assert "same logits" in run(hub, sys.executable, "-c", TRIED, hub, tmp_path)


@with_kernels
def test_the_repositorys_own_tests_and_benchmarks_run(hub):
    tests = run(hub, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert "5 passed" in tests
    table = run(hub, Path(sys.executable).with_name("kernels"), "benchmark", ".", "--iterations", "2", "--warmup", "1")
    assert all(case in table for case in ("rms_norm", "silu_product", "tree"))
