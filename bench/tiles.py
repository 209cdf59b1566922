"""What if a kernel had other tiles? Each choice is timed beside the present one, and must compute the same.

    python bench/tiles.py [--only attention] [--json FILE]

attention   rows x keys of a block, warps, stages, and the fewest rows of a split; bfloat16, heads of 128
compaction  units that a program moves, at most: 32 layers, 32 heads of 128, 4 accepted nodes
registers   the most registers of a thread in drawing and verifying: fewer let more programs run at once, and may spill

On a GPU each time is the median of triton.testing.do_bench of a CUDA graph, with an L2 cache emptied before every run.
A choice that does not compile or needs too much memory is named and passed over. Without a GPU only the present choice
runs, by the references.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from common import DEVICE, argument_parser, captured, environment, gpu_milliseconds, in_turns, kept, random_tree, show
from torch import Tensor
from triton.runtime.jit import KernelInterface

from heavypath.kernels.cache_compaction import compact_cache
from heavypath.kernels.sampling import gumbel_topk
from heavypath.kernels.tree_attention import tree_attention
from heavypath.kernels.verification import verify_tree

PRESENT = "as it is"
Run = Callable[[], Any]


class Choice(NamedTuple):
    """What is changed: values of a kernel's module by their names, or the options of every launch."""

    name: str
    module: str = ""
    values: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012


def tiles(block_m: int, block_n: int, warps: int, stages: int) -> Choice:
    chosen = block_m, block_n, warps, stages
    name = f"{block_m} x {block_n}, {warps} warps, {stages} stages"
    return Choice(name, "attention.launch", {"_tiles": lambda *_: chosen})


TILES = [
    tiles(block_m, block_n, warps, stages)
    for block_m, block_n, warps in ((16, 64, 4), (32, 64, 4), (64, 32, 4), (64, 64, 4), (64, 128, 8), (128, 64, 8))
    for stages in (2, 3, 4)
]
SPLITS = [Choice(f"splits of {rows} rows", "attention.launch", {"MIN_SPLIT": rows}) for rows in (128, 512, 1024)]
MOVED = [Choice(f"{units} units", "cache_compaction", {"_TILE": units}) for units in (1024, 2048, 4096, 16384)]
REGISTERS = [Choice(f"at most {most} registers", options={"maxnreg": most}) for most in (64, 96, 128, 168)]


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """The choice holds within the block."""
    module = import_module(f"heavypath.kernels.{choice.module}") if choice.module else None
    before = {name: getattr(module, name) for name in choice.values}
    subscript = KernelInterface.__getitem__

    def with_options(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = subscript(kernel, grid)
        return lambda *arguments, **given: launch(*arguments, **given | choice.options)

    plans = vars(import_module("heavypath.kernels.tree_attention"))["_plan"]  # which hold the tiles
    plans.cache_clear()
    for name, value in choice.values.items():
        setattr(module, name, value)
    if choice.options:
        KernelInterface.__getitem__ = with_options
    try:
        yield
    finally:
        KernelInterface.__getitem__ = subscript
        for name, value in before.items():
            setattr(module, name, value)
        plans.cache_clear()


def attention(nodes: int, prefix: int, heads: tuple[int, int], head_dim: int = 128) -> Run:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

    query, rows = draw(1, heads[0], nodes, head_dim), prefix + nodes
    key, value = draw(1, heads[1], rows, head_dim), draw(1, heads[1], rows, head_dim)
    end = random_tree(nodes).reordered("heavy_path")[0].subtree_end.to(DEVICE)
    lengths = torch.tensor([prefix], device=DEVICE)
    return lambda: tree_attention(query, key, value, prefix_length=lengths, subtree_end=end)


def compaction(layers: int, heads: int, head_dim: int) -> Run:
    keys, values = ([torch.zeros(1, heads, 576, head_dim, device=DEVICE).half() for _ in range(layers)] for _ in "kv")
    path = torch.tensor([[0, 3, 9, 17, 30, -1, -1, -1]], device=DEVICE)
    length, prefix = torch.tensor([4], device=DEVICE), torch.tensor([300], device=DEVICE)
    return lambda: compact_cache(keys, values, path, length, prefix)


def drawing(rows: int, vocabulary: int, **filters: Any) -> Run:
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    logits = logits.bfloat16()
    return lambda: gumbel_topk(logits, 4, temperature=0.6, seed=1, **filters).tokens


def verifying(method: str, nodes: int, vocabulary: int) -> Run:
    tree = random_tree(nodes).reordered("heavy_path")[0]
    generator = torch.Generator(DEVICE).manual_seed(0)
    target = 3 * torch.randn(1, nodes, vocabulary, generator=generator, device=DEVICE)
    draft = target + torch.randn(target.shape, generator=generator, device=DEVICE)
    target, draft = target.bfloat16(), draft.bfloat16()
    tokens = torch.arange(nodes, device=DEVICE)[None]
    parents, ranks, depth = tree.parents.to(DEVICE), tree.ranks.to(DEVICE), int(tree.depths.max())
    rows = torch.arange(nodes, device=DEVICE)[None]
    return lambda: (
        verify_tree(
            tokens, parents, target, draft, method=method, ranks=ranks, max_depth=depth, temperature=0.6, rows=rows
        ).path
    )


class Question(NamedTuple):
    """A table's line: a problem, and the choices for it."""

    table: str
    case: str
    problem: Callable[[], Run]
    choices: list[Choice]


QUESTIONS = [
    *(
        Question(
            "attention",
            f"{nodes} nodes, {prefix} rows, {heads[0]}/{heads[1]} heads",
            partial(attention, nodes, prefix, heads),
            TILES + SPLITS,
        )
        for heads in ((32, 32), (32, 8))
        for nodes, prefix in ((32, 256), (32, 2048), (64, 8192))
    ),
    Question("compaction", "32 layers, 32 heads", partial(compaction, 32, 32, 128), MOVED),
    *(
        Question(
            "registers",
            f"draw from {rows} x 128256{named}",
            lambda r=rows, f=filters: drawing(r, 128256, **f),
            REGISTERS,
        )
        for rows in (1, 64)
        for named, filters in (("", {}), (", top-p", {"top_p": 0.9}))
    ),
    *(
        Question("registers", f"verify 32 x 128256, {method}", partial(verifying, method, 32, 128256), REGISTERS)
        for method in ("without_replacement", "race")
    ),
]
MINIATURE = [
    Question("attention", "4 nodes", partial(attention, 4, 20, (2, 1), 16), TILES[:1] + SPLITS[:1]),
    Question("compaction", "1 layer", partial(compaction, 1, 1, 8), MOVED[:1]),
    Question("registers", "draw from 1 x 100", partial(drawing, 1, 100), REGISTERS[:1]),
    Question("registers", "verify 4 x 50", partial(verifying, "race", 4, 50), REGISTERS[:1]),
]


def answers(questions: list[Question]) -> Iterator[dict]:
    """A row for each choice of each question."""
    for question in questions:
        run, expected, base = question.problem(), None, None
        for choice in [Choice(PRESENT), *(question.choices if DEVICE == "cuda" else [])]:
            row: dict[str, Any] = {"table": question.table, "case": question.case, "choice": choice.name}
            try:
                with chosen(choice), torch.inference_mode():
                    found = run()
                    on_gpu = DEVICE == "cuda"
                    milliseconds = gpu_milliseconds(captured(run)) if on_gpu else 1e3 * min(in_turns({"": run}, 5)[""])
                expected, base = (found, milliseconds) if base is None else (expected, base)
                row["microseconds"], row["of_the_present"] = 1e3 * milliseconds, milliseconds / base
                if isinstance(found, Tensor):
                    row["same"] = bool(torch.allclose(found.float(), expected.float(), atol=2e-2))
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:200]
            yield row


def main() -> None:
    parser = argument_parser(__doc__)
    tables = tuple(dict.fromkeys(question.table for question in QUESTIONS))
    parser.add_argument("--only", choices=tables, help="one of the tables")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    asked = MINIATURE if arguments.miniature else QUESTIONS
    questions = [each for each in asked if arguments.only in (None, each.table)]
    rows = kept(answers(questions), environment(), arguments.json)
    shown = []
    for case in dict.fromkeys(row["case"] for row in rows):
        here = [row for row in rows if row["case"] == case]
        timed = sorted((row for row in here if "microseconds" in row), key=lambda row: row["microseconds"])
        wrong = [row for row in here if "failed" in row or not row.get("same", True)]
        shown += [row for row in timed if row in timed[:4] or row["choice"] == PRESENT or row in wrong]
        shown += [row for row in wrong if row not in timed]
    show(shown)


if __name__ == "__main__":
    main()
