"""Which model of acceptance predicts and plans best: one vector, by depth, by the parent's rank, or by both?

    python bench/acceptance_models.py [--passes 2] [--tokens 256] [--method sequoia] [--temperature 1] [--json FILE]

A model gives the chance that child j of a node is accepted. Each is counted on texts behind one half of the prompts,
on all of them and on as much as a calibration counts ("few"), and plans trees by greedy_tree. What these trees yield
is seen on texts behind the other half.

Nothing is decoded for that. Recursive rejection and the race decide about a child before they look at its younger
siblings, so the target's text, with the rank at which each token was accepted among eight children (`walk`), tells
what any tree of up to eight children would have yielded: a step goes down the tree along the ranks as long as it has
such a child, and the text's next token is its last. So all trees are compared on the same texts.

Printed are tokens per forward; for planned trees the gain over the tree planned by depth, with a jackknife over the
prompts; and the errors of what each model expects, counted on the other half and on the very same texts.
"""

import math
from collections.abc import Sequence

import torch
from common import argument_parser, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from markov import PRIOR, falling, markov_acceptance, markov_table
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.speculative import METHODS, TokenTree, expected_tokens, greedy_tree
from heavypath.speculative.calibration import CHILDREN, DEPTH, Extent, Way, walk
from heavypath.speculative.demo import DemoPair, demo_prompts
from heavypath.speculative.drafts.kinds import as_draft
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.trees.planning import PathAcceptance

CASES = (("sequoia", 1.0), ("sequoia", 0.6), ("ersd", 1.0))
TEXTS = 8  # behind each prompt in a pass
CALIBRATION = 48, 48  # texts, and tokens of each
VECTOR, BY_DEPTH, BY_PARENT, BY_BOTH = "[child]", "[depth, child]", "[parent, child]", "[depth, parent, child]"
MODELS = (VECTOR, BY_DEPTH, BY_PARENT, BY_BOTH)


def recorded(pair: DemoPair, prompts: list[Tensor], method: str, temperature: float, arguments) -> Tensor:
    """The rank of each token of texts behind the prompts, [seeds * prompts, T], -1 for none of the eight children."""
    target = forward_of(pair.target, "target")
    way, tokens = Way(METHODS[method].kind(temperature), None), arguments.tokens
    draft = as_draft(pair.draft, target, pair.target)
    extent = Extent(
        tokens, TEXTS * len(prompts), depth=tokens
    )  # as deep as texts are long: children are always offered
    passes = [
        walk(target, draft, prompts, way, Filters(temperature), extent, seed).ranks for seed in range(arguments.passes)
    ]
    return torch.cat([ranks for each in passes for ranks in each]).long()


def bounded(ranks: Tensor) -> Tensor:
    """How often a node was reached, and what was accepted, [depth, parent, 1 + child], as calibration counts.

    Parent 0 is none, below the root, and outcome 0 is none. Behind `DEPTH` accepted tokens nothing is offered.
    """
    counts = torch.zeros(DEPTH + 1, CHILDREN + 1, CHILDREN + 1, dtype=torch.float64)
    at = parent = torch.zeros(len(ranks), dtype=torch.long)
    for rank in ranks.T:
        counts.index_put_((at, parent, rank + 1), torch.ones((), dtype=torch.float64), accumulate=True)
        goes_on = (rank >= 0) & (at < DEPTH)
        at, parent = (at + 1).where(goes_on, 0), (rank + 1).where(goes_on, 0)
    return counts[:DEPTH]


def models(ranks: Tensor) -> dict[str, PathAcceptance]:
    """Each model, counted on some texts; all of them end at `DEPTH`."""
    counts = bounded(ranks)

    def rates(counted: Tensor, mean: Tensor) -> Tensor:
        shares = (counted[..., 1:] + PRIOR * mean) / (counted.sum(-1, keepdim=True) + PRIOR)
        return falling(shares.view(-1, CHILDREN)).view(shares.shape)

    whole = counts.sum((0, 1))
    vector = falling(whole[None, 1:] / whole.sum())[0]
    by_depth, by_parent = rates(counts.sum(1), vector), markov_table(ranks, CHILDREN, PRIOR)
    by_both = rates(counts, by_parent).tolist()
    rows, flat, markov = by_depth.tolist(), vector.tolist(), markov_acceptance(by_parent)
    found: dict[str, PathAcceptance] = {
        VECTOR: lambda path: flat,
        BY_DEPTH: lambda path: rows[len(path)],
        BY_PARENT: markov,
        BY_BOTH: lambda path: by_both[len(path)][1 + path[-1] if path else 0],
    }
    return {name: lambda path, rates=rates: rates(path) if len(path) < DEPTH else [] for name, rates in found.items()}


def replayed(tree: TokenTree, ranks: Tensor, prompts: int) -> tuple[Tensor, Tensor]:
    """Tokens and steps that decoding with a tree would have taken on these texts, [prompts] each.

    The steps that begin within tree.depth + 1 tokens of a text's end are left out: they might be cut short.
    """
    child = torch.full((len(tree), CHILDREN + 1), -1)  # by node and 1 + rank
    child[tree.parents[1:].long(), 1 + tree.ranks[1:].long()] = torch.arange(1, len(tree))
    padded = torch.cat([ranks, ranks.new_full((len(ranks), tree.depth), -1)], 1)
    node, length = torch.zeros_like(ranks), torch.ones_like(ranks)  # of the steps that begin at each token
    for depth in range(tree.depth):
        below = child[node, 1 + padded[:, depth : depth + ranks.shape[1]]]
        node = below.where(node >= 0, -1)
        length += node >= 0
    text, at, end = torch.arange(len(ranks)), torch.zeros(len(ranks), dtype=torch.long), ranks.shape[1] - tree.depth - 1
    tokens, steps = torch.zeros_like(at), torch.zeros_like(at)
    while (at < end).any():
        taken = length[text, at.clamp(max=end - 1)] * (at < end)
        tokens, steps, at = tokens + taken, steps + (at < end), at + taken
    return tokens.view(-1, prompts).sum(0).double(), steps.view(-1, prompts).sum(0).double()


def gain(mine: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[float, float]:
    """How many times the other's tokens per forward, less 1, and the standard error, over the prompts."""
    (tokens, steps), (other_tokens, other_steps) = mine, other
    count = len(tokens)

    def ratio(kept: Tensor) -> float:
        return float(tokens[kept].sum() / steps[kept].sum() * other_steps[kept].sum() / other_tokens[kept].sum())

    without = torch.tensor([ratio(torch.arange(count) != left) for left in range(count)])
    error = math.sqrt((count - 1) * float(without.var(correction=0)))
    return ratio(torch.arange(count)) - 1, error


def compared(counted: Tensor, held_out: Tensor, prompts: int, sizes: Sequence[int]) -> list[dict]:
    """A row for each tree: what it yields on held-out texts, and what each model expected."""
    texts, tokens = CALIBRATION
    ours, theirs, few = models(counted), models(held_out), models(counted[:texts, :tokens])
    trees = {"chain 8": TokenTree.chain(8), "three children, three levels": TokenTree.k_ary(3, 3)}
    for size in sizes:
        for note, planners in (("", ours), (", few", few)):
            trees |= {f"{size} by {name}{note}": greedy_tree(planners[name], size) for name in MODELS}
    yields = {name: replayed(tree, held_out, prompts) for name, tree in trees.items()}
    rows = []
    for name, tree in trees.items():
        real = float(yields[name][0].sum() / yields[name][1].sum())
        row = {"tree": name, "levels": tree.depth, "tokens_per_forward": real}
        for field, counts in (("error", ours), ("error_on_the_same_texts", theirs)):
            row[field] = {model: expected_tokens(tree, counts[model]) / real - 1 for model in MODELS}
        if " by " in name:
            row["gain"], row["gain_error"] = gain(yields[name], yields[f"{name.split(' by ')[0]} by {BY_DEPTH}"])
        rows.append(row)
    return rows


def as_table(rows: Sequence[dict]) -> Table:
    table = Table("method", "T", "tree", "tokens/forward", "gain")
    for model in MODELS:
        table.add_column(model, justify="right")
    for row in rows:
        errors = [f"{row['error'][m]:+.1%}, {row['error_on_the_same_texts'][m]:+.1%}" for m in MODELS]
        table.add_row(
            row["method"], f"{row['temperature']:g}", row["tree"], f"{row['tokens_per_forward']:.3f}",
            f"{row['gain']:+.2%} ({row['gain_error']:.2%})" if "gain" in row else "", *errors,
        )  # fmt: skip
    return table


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--passes", type=int, default=2, help="each writes eight texts behind each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--method", choices=sorted({method for method, _ in CASES}), help="default: all")
    parser.add_argument("--temperature", type=float, help="default: all")
    arguments = parser.parse_args()
    if arguments.miniature:
        arguments.prompts, arguments.passes, arguments.tokens, arguments.sizes = 4, 1, 16, [4]
    torch.set_num_threads(arguments.threads)
    pair, console = quiet_demo_pair(), Console(stderr=True)
    prompts = [ids[0] for ids in token_ids(pair.tokenizer, demo_prompts()[: arguments.prompts])]
    wanted = [
        case for case in CASES
        if arguments.method in (None, case[0]) and arguments.temperature in (None, case[1])
    ]  # fmt: skip
    rows = []
    with until_stopped():
        for method, temperature in track(wanted, "models of acceptance", console=console):
            halves = [recorded(pair, prompts[first::2], method, temperature, arguments) for first in (0, 1)]
            found = compared(halves[0], halves[1], len(prompts[1::2]), arguments.sizes)
            rows += [{"method": method, "temperature": temperature} | row for row in found]
    Console(width=180, markup=False).print(as_table(rows))
    settings = {name: getattr(arguments, name) for name in ("prompts", "passes", "tokens")}
    write_results(arguments.json, environment("cpu") | settings, rows=rows)


if __name__ == "__main__":
    main()
