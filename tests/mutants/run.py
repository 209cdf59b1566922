"""Make mutants of the functions that decide the text, and fail for one that no test finds.

    python tests/mutants/run.py                     a mutant of each function, the same ones every time
    python tests/mutants/run.py --area commit --most 20 --jobs 4

Where one survives, write a test that finds it; if no test can, say so in EQUIVALENT.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("PYTEST_ADDOPTS", "--every-variant")
sys.path[0] = str(Path(__file__).resolve().parents[1] / "support")

from mutant_runs import LINKS, ROOT, Result, Runner  # noqa: E402
from mutants import Mutant, chosen, mutants  # noqa: E402

EQUIVALENT = {  # mutants by file, function and what their line becomes, and why no test can find them
    (
        "kernels/recurrent/acceptance.py", "_launch",
        "if any(size < 16 or size & (size - 2) for size in (key_columns, columns)):",
    ): "from 16 on both are 0 for powers of two alone",
    (
        "kernels/recurrent/blocks_kernel.py", "_product",
        "return tl.dot(one, other, out)",
    ): "the interpreter has no tf32; the PTX emulator has",
    (
        "kernels/recurrent/blocks_kernel.py", "_rows",
        "loaded = tl.load(pointer, mask=inside)",
    ): "the interpreter puts 0 there; the PTX emulator puts anything",
    (
        "kernels/recurrent/convolution.py", "_launch",
        "inputs = inputs if inputs.stride(2) == 0 else inputs.contiguous()",
    ): "a copy more, which changes nothing",
    (
        "kernels/recurrent/pairs.py", "launch_pairs",
        "of_keys, of_queries = torch.empty(2, heads, batch, nodes, nodes, dtype=torch.float32, device=key.device)",
    ): "only addresses are passed on",
    (
        "kernels/recurrent/paths.py", "Paths.outside",
        "above = number.where(seen, nodes).sort(-1).values.clamp(max=nodes + 1)",
    ): "behind the counted ones anything may be",
    (
        "kernels/recurrent/paths.py", "Paths.windows",
        "above_root = torch.arange(taps) - self.mask.sum(-1, keepdim=True)",
    ): "the same on a CPU",
    (
        "kernels/recurrent/totals.py", "path_totals",
        'if (impl != "auto" or before) and choose_impl("path_totals", impl, gates) == "triton":',
    ): "a choice that only a GPU makes",
    (
        "speculative/models/recurrent/nodes.py", "States.tensors",
        "return [self.position, *(one.flatten(3) for one in self.recurrent.values()), *self.convolved.values()]",
    ): "their shapes do not matter",
    (
        "kernels/sampling_kernel.py", "open_groups",
        "octet = tl.reshape(tl.where(opened[:, None] >= 0, octet, V // 8 + 2), [OPENED * TILES])",
    ): "either is behind the vocabulary",
    (
        "kernels/commit.py", "_commit_kernel",
        "emitted = tl.load(tokens_ptr + node, mask=place < length, other=(-1))",
    ): "the next line puts another number there",
    (
        "kernels/verifying/distributions.py", "overlap",
        "y = tl.load(draft.row_ptr + token, mask=token < end).to(tl.float32)",
    ): "P is 0 there, and so is the smaller of both",
    (
        "kernels/verifying/drafted_tree.py", "nodes_of",
        "token = tl.load(tokens_ptr + index, mask=index < N).to(tl.int32)",
    ): "such a place has no parent, and so no node is there",
    (
        "kernels/verifying/held.py", "hold_at_node",
        "scale = tl.where(whole > 0, (1 - chance) / whole, 1.0)",
    ): "where this is taken, all that it multiplies is 0",
    (
        "kernels/verifying/walk.py", "_walk_kernel",
        "left_out &= tl.load(left_out_ptr + batch * N + index, mask=left_out) > 0",
    ): "what is loaded is and-ed with the mask",
    (
        "kernels/filter_cuts.py", "cuts_by_sequence",
        "return _launched(logits, settings, 1.0, 1, (-1.0), 0.0)",
    ): "each sequence's own settings stand in its place",
    (
        "kernels/trees/growing_kernel.py", "_offer_children",
        "largest = tl.load(keys_ptr, mask=alive, other=1.0)",
    ): "looked at only where a child was drawn",
    (
        "kernels/trees/growing_kernel.py", "_grow_kernel",
        "slot = tl.load(values_ptr + slot_of, mask=there, other=1.0)",
    ): "nothing is stored of places that are not there",
    (
        "kernels/trees/levels_kernel.py", "_place_kernel",
        "token = tl.load(tokens_ptr + node, mask=here, other=(-1), volatile=True)",
    ): "nothing is stored of places that are not there",
    (
        "kernels/noise.py", "seed_arguments",
        'return {"seed_ptr": seed, "seed_low": 0, "seed_high": (-1)}',
    ): "not looked at where the seed is in memory",
    (
        "kernels/trees/slots.py", "Slots.room_for",
        "return cls(parents, ranks, depths, tokens, worths, values, keys)",
    ): "memory of one type, in which nothing is written yet",
    (
        "kernels/verifying/decision.py", "decide",
        "helping = helpers(device) if not (passes) else 0",
    ): "helpers change no result, and the interpreter has none",
    (
        "kernels/verifying/distributions.py", "log_weights",
        "return filtered_scores(row, row.max(keepdims=False), filters) * np.float32(math.log2(math.e))",
    ): "a row's largest logit is the same number outside of an array",
    (
        "kernels/verifying/distributions.py", "unread",
        "return Distribution(row_ptr, (-1.0), 0.0, temperature, cut, end)",
    ): "the largest logit is set before it is read",
    (
        "kernels/attention/launch.py", "tiles_for",
        "if not (rows <= 16):",
    ): "tiles of any size give the same numbers",
    (
        "kernels/commit.py", "commit",
        "pass",
    ): "only CUDA tensors are refused there",
    (
        "kernels/filter_cuts.py", "_launched",
        "if rows == (-1):",
    ): "the interpreter takes a grid of no programs",
    (
        "kernels/noise.py", "philox_words",
        "k0 = seed_low.to(tl.uint32)",
    ): "the same bits",
    (
        "kernels/sampling_kernel.py", "launch_topk",
        "OPENED=max(16, max(4, block)),",
    ): "how many groups are looked at together changes no token",
    (
        "kernels/sequence_scores.py", "launch",
        "scores = torch.empty(logits.shape, device=logits.device)",
    ): "the default dtype of PyTorch",
    (
        "kernels/trees/growing_kernel.py", "grow",
        "warps = max(1, min(16, triton.next_power_of_2(max(parents, count)) * 64))",
    ): "the number of warps changes no number",
    (
        "speculative/models/recurrent/nodes.py", "TextTokens.recur",
        "size = PAIRS if not (rule is tree_kda) else CHUNK",
    ): "chains of any length give the same states",
}  # fmt: skip
LIBRARIES = (
    "torch", "numpy", "scipy.stats", "triton.language", "triton.runtime.interpreter", "hypothesis",
    "transformers.models.llama.modeling_llama", "transformers.generation", "torch.nn.functional", "accelerate",
)  # fmt: skip


class Area(NamedTuple):
    """Files of the package, and the tests that are to find mutants of their functions.

    native: whether the tests first run compiled code where there is some, or the references; then the other way
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    native: bool = False


AREAS = {
    "verification": Area(
        ("kernels/verification.py", "kernels/verifying/*.py", "kernels/nodes.py"),
        (
            "tests/kernels/test_verif*.py", "tests/kernels/test_traversal.py", "tests/kernels/test_held.py",
            "tests/kernels/test_top_down.py",
            "tests/kernels/test_adversary.py", "tests/mutants/test_mutations.py", "tests/mutants/test_survivors.py",
            "tests/core/test_own_verifier.py",
        ),
    ),
    "sampling": Area(
        (
            "kernels/sampling*.py", "kernels/filtering.py", "kernels/filter_cuts.py", "kernels/noise.py",
            "kernels/nucleus.py", "kernels/sequence_scores.py", "kernels/trees/*.py",
        ),
        (
            "tests/kernels/test_sampling.py", "tests/kernels/test_filter*.py", "tests/kernels/test_noise.py",
            "tests/kernels/test_nucleus.py", "tests/kernels/test_sequence_scores.py", "tests/kernels/test_levels.py",
            "tests/kernels/test_slots.py",
            "tests/kernels/test_adversary.py", "tests/mutants/test_mutations.py",
            "tests/mutants/test_survivors.py", "tests/core/test_growing.py",
        ),
    ),
    "attention": Area(
        ("kernels/tree_attention.py", "kernels/attention/*.py"),
        (
            "tests/kernels/test_tree_attention.py", "tests/kernels/test_windows.py", "tests/kernels/test_sharing.py",
            "tests/kernels/test_launches.py", "tests/kernels/test_adversary.py", "tests/mutants/test_survivors.py",
        ),
    ),
    "commit": Area(
        ("kernels/commit.py",),
        ("tests/kernels/test_commit.py", "tests/kernels/test_adversary.py", "tests/mutants/test_mutations.py"),
    ),
    "compaction": Area(
        ("kernels/cache_compaction.py",),
        (
            "tests/kernels/test_cache_compaction.py", "tests/kernels/test_adversary.py",
            "tests/mutants/test_mutations.py", "tests/mutants/test_survivors.py",
        ),
    ),
    "recurrent": Area(
        (
            *(
                f"kernels/recurrent/{name}.py"
                for name in (
                    "acceptance", "blocks_kernel", "convolution", "delta", "kda", "pairs", "paths", "ssd", "totals",
                )
            ),
            "speculative/models/recurrent/cache.py",
            "speculative/models/recurrent/nodes.py",
        ),
        (
            "tests/kernels/test_recurrent.py", "tests/core/test_recurrent_models.py",
            "tests/core/test_recurrent_passes.py", "tests/core/test_prompts_of_many_lengths.py",
        ),
    ),
    "reference": Area(
        ("speculative/reference/chain.py", "speculative/reference/tree.py"), ("tests/core/test_reference.py",)
    ),
    "step": Area(
        tuple(
            f"speculative/decoding/{name}.py"
            for name in (
                "step", "drafted", "drafting", "sequences", "growing", "processing", "typical",
            )
        ),
        (
            "tests/core/test_step.py", "tests/core/test_decoder.py", "tests/core/test_growing.py",
            "tests/core/test_methods.py", "tests/core/test_sixteen_bits.py", "tests/core/test_own_verifier.py",
            "tests/options/test_processing.py", "tests/conformance", "tests/mutants/test_mutations.py",
            "tests/mutants/test_survivors.py",
        ),
        native=True,
    ),
}  # fmt: skip


def main() -> int:
    given = arguments()
    stale = stale_entries()
    for library in LIBRARIES:
        import_module(library)
    for plugin in entry_points(group="pytest11"):
        plugin.load()
    survived, measured = [], {True: {}, False: {}}  # tests of files that several areas have, by whether it is native
    for name in given.area or AREAS:
        area, several = AREAS[name], of_files(AREAS[name].files, given.most)
        runners = [
            Runner(ROOT, LINKS, jobs=given.jobs, environment={} if native else {"HEAVYPATH_NATIVE": "0"})
            for native in (area.native, not area.native)
        ]
        print(f"{name}: {len(several)} mutants; which tests reach their functions?", flush=True)
        files = test_files(area)
        of_file = measured[area.native]
        of_file |= runners[0].measured([file for file in files if file not in of_file])
        for mutant, result in outcomes(*runners, several, [test for file in files for test in of_file[file]]):
            print(said(mutant, result), flush=True)
            if not result.found_by and named(mutant) not in EQUIVALENT:
                survived.append(said(mutant, result))
    print(f"\n{len(survived)} mutants survived that are not in EQUIVALENT", *survived, sep="\n")
    print(f"{len(stale)} entries of EQUIVALENT are no mutants any more", *stale, sep="\n")
    return bool(survived or stale)


def named(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.function, mutant.replacement


def stale_entries() -> list[tuple]:
    """Names in EQUIVALENT that no mutant has."""
    files = dict.fromkeys(file for file, *_ in EQUIVALENT)
    names = {named(mutant) for file in files for mutant in mutants(file, (ROOT / file).read_text())}
    return [name for name in EQUIVALENT if name not in names]


def outcomes(
    first: Runner, second: Runner, several: list[tuple[Mutant, str]], tests: list
) -> Iterator[tuple[Mutant, Result]]:
    """What becomes of mutants in one runner, and of those that survive there in another, but for Triton's kernels."""
    sources, survived = dict(several), []
    for mutant, result in first.results(several, tests):
        kernel = re.search(rf"@triton\.jit[^@]*?\ndef {mutant.function}\(", sources[mutant])
        if result.found_by or not result.tests or kernel:
            yield mutant, result
        else:
            survived.append((mutant, sources[mutant]))
    yield from second.results(survived, tests)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--area", action="append", choices=AREAS, help="of the code (default: all); may be repeated")
    parser.add_argument("--most", type=int, default=1, help="mutants of a function (default: 1)")
    parser.add_argument("--all", dest="most", action="store_const", const=None, help="all mutants, which takes days")
    parser.add_argument("--jobs", type=int, default=2, help="processes, about 1 GB each (default: 2)")
    return parser.parse_args()


def of_files(patterns: tuple[str, ...], most: int | None) -> list[tuple[Mutant, str]]:
    """The chosen mutants of files, each with the file's text."""
    found = []
    for path in (path for pattern in patterns for path in sorted(ROOT.glob(pattern))):
        source = path.read_text()
        of_file = mutants(str(path.relative_to(ROOT)), source)
        found += [(mutant, source) for mutant in chosen(of_file, source, most)]
    return found


def test_files(area: Area) -> list[str]:
    """The test files of an area."""
    paths = [path for pattern in area.tests for path in sorted(ROOT.glob(pattern))]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return [str(file.relative_to(ROOT)) for file in files]


def said(mutant: Mutant, result: Result) -> str:
    """A line that says what became of a mutant."""
    how = f"found by {result.found_by}" if result.found_by else f"SURVIVED {result.tests} tests"
    where = f"{mutant.file}:{mutant.line} {mutant.function}"
    return f"{where}: {shorter(mutant.original)} -> {shorter(mutant.replacement)}: {how}, {result.seconds:.0f} s"


def shorter(text: str, most: int = 90) -> str:
    return text if len(text) <= most else text[: most - 4] + " ..."


if __name__ == "__main__":
    sys.exit(main())
