"""Which trees accept more where the draft's laws are those of a block, on languages whose laws are all known.

    python bench/blocks.py [--languages 30] [--trees 20] [--kinds flat] [--json FILE]

A language is a Markov chain of order 2 over 16 tokens with random logits, made as sharp as its kind says: at
temperature 1 its likeliest token has that probability on average. A head has learnt it at temperature 1. What its laws
depend on is

    depth    the depth alone: DFlash
    anchor   the depth, as if the tokens before were the likeliest ones: JetSpec
    token    the depth and the token before: DSpark, DFlash2
    path     all tokens before

The laws are those of the language, given no more than that, or random numbers are added to their logits, so large that
they overlap with the language's by `overlap` at depth 1 on average; it is 1 for exact ones. At another temperature T
the target's logits and the head's are divided by it; at 0 the target takes its likeliest token. A tree has no more
levels than the block, and grows best first. The ways:

    likeliest   the likeliest tokens, by products of their laws, and one sampled of the target at each node (EAGLE-2,
                DDTree)
    naive       tokens drawn without replacement, by what is left of the law (DySpec), and one sampled of the target
    rejection   the same trees, by recursive rejection
    fixed       the likeliest tokens, in the best shape by how often child k of a depth is accepted, which is counted in
                other texts (Sequoia)
    planned     the same with drawn tokens and by rejection
    mixed       the same with tokens drawn at depth 1 and the likeliest ones below
    sharpened   planned, where the head's logits are divided by a temperature more, one for depth 1 and one for all
                below it; 0 for the likeliest tokens. Chosen by the odd languages and counted by the even ones: "even"
                has what others have by those

and a chain with as many levels as the block, of the likeliest tokens or of drawn ones, whichever accepts more. What is
counted are accepted tokens a step, without the one that the target adds. No coin is tossed: chains and trees of the
likeliest tokens are summed over all texts, and a tree that is drawn has its exact mean given its tokens. What is left
to chance are the languages, and `--trees` draws for each; errors are standard errors of the mean over the languages.
`ratio` is the tokens of a step with the best of `likeliest`, `fixed` and `planned`, by the chain's.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from common import Row, argument_parser, environment, options_of, report
from torch import Tensor
from torch.nn.functional import one_hot

from heavypath.speculative.trees.acceptance import chain_acceptance

TOKENS = 16
KINDS = {"peaked": 0.78, "middle": 0.56, "flat": 0.36}
LAWS = ("depth", "anchor", "token", "path")
CASES = (  # overlap of the head, temperature, nodes and levels
    (1.0, 1.0, 8, 4), (1.0, 1.0, 32, 4),
    *((overlap, temperature, 64, 7) for overlap in (1.0, 0.75) for temperature in (0.0, 0.6, 1.0)),
)  # fmt: skip
SHARPER = (1.0, 0.7, 0.5, 0.0)
TEXTS = 200  # of each language, in which acceptance is counted
TINY = 1e-300


class Trees(NamedTuple):
    """Drafted trees, one in each row: node 0 is the root, and parents come before their children.

    parents, ranks: LongTensor[B, N], the node above, and which child of it in draw order; -1 for the root
    context:        LongTensor[B, N, 2], the node's own token and the one before it, the older one first
    drawn:          LongTensor[B, N, K], the tokens of a node's children in draw order, -1 where there is none
    laws:           [B, N, V], that they were drawn of
    likeliest:      [B, N], true where they were not drawn, but are the likeliest ones
    """

    parents: Tensor
    ranks: Tensor
    context: Tensor
    drawn: Tensor
    laws: Tensor
    likeliest: Tensor


def languages(count: int, sharpness: float, seed: int, tokens: int = TOKENS) -> Tensor:
    """Logits [count, V, V, V] of the token after two others, whose largest probability is `sharpness` on average."""
    logits = torch.randn(count, tokens, tokens, tokens, generator=torch.Generator().manual_seed(seed)).double()
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        sharper = float((middle * logits).softmax(-1).amax(-1).mean()) < sharpness
        low, high = (middle, high) if sharper else (low, middle)
    return low * logits


def tempered(laws: Tensor, temperature: float) -> Tensor:
    """Laws [.., V] at a temperature; at 0 all is at the likeliest token."""
    if temperature == 0:
        return one_hot(laws.argmax(-1), laws.shape[-1]).double()
    return (laws.clamp_min(TINY).log() / temperature).softmax(-1)


def laws_of_head(language: Tensor, kind: str, levels: int, error: float = 0.0, seed: int = 0) -> Tensor:
    """The laws [L, D, V, V, V] of a head at each depth after two tokens, for laws [L, V, V, V] and the root (0, 0).

    error: of normal numbers that are added to the logits
    """
    count, tokens, noise = *language.shape[:2], torch.Generator().manual_seed(seed)
    reached = language.new_zeros(count, tokens, tokens)  # the probability of the last two tokens
    reached[:, 0, 0] = 1
    anchor, every = torch.zeros(count, 2, dtype=torch.long), torch.arange(count)
    found = []
    for _ in range(levels):
        joint = reached[..., None] * language  # of the last three
        if kind == "depth":
            law = joint.sum((1, 2))[:, None, None]
        elif kind == "anchor":
            law = language[every, anchor[:, 0], anchor[:, 1]]
            anchor = torch.stack([anchor[:, 1], law.argmax(-1)], 1)
            law = law[:, None, None]
        elif kind == "token":
            pairs = joint.sum(1)
            law = (pairs / pairs.sum(-1, keepdim=True).clamp_min(TINY))[:, None]
        else:
            law = language
        if error:
            law = (law.clamp_min(TINY).log() + error * torch.randn(law.shape, generator=noise)).softmax(-1)
        found.append(law.expand_as(language))
        reached = joint.sum(1)
    return torch.stack(found, 1)


def error_of(language: Tensor, overlap: float, seed: int) -> float:
    """The error of a head whose laws at depth 1 have this overlap with the language's, on average."""
    low, high = 0.0, 20.0
    for _ in range(30 if overlap < 1 else 0):
        middle = (low + high) / 2
        law = laws_of_head(language, "depth", 1, middle, seed)[:, 0, 0, 0]
        closer = float(law.minimum(language[:, 0, 0]).sum(-1).mean()) > overlap
        low, high = (middle, high) if closer else (low, middle)
    return low


def chain_accepts(target: Tensor, head: Tensor, drawn: bool) -> Tensor:
    """Tokens [L] that a step accepts of a chain, drawn or of the likeliest tokens: summed over all texts."""
    reached = torch.zeros(target.shape[:3], dtype=torch.float64)
    reached[:, 0, 0] = 1
    accepted = torch.zeros(len(target), dtype=torch.float64)
    for law in head.unbind(1):
        common = target.minimum(law) if drawn else target * tempered(law, 0)
        reached = (reached[..., None] * common).sum(1)
        accepted += reached.sum((1, 2))
    return accepted


def acceptance(target: Tensor, head: Tensor, likeliest: Sequence[bool], texts: int, seed: int) -> Tensor:
    """How often child k of a text's token is the accepted one at each depth, [L, D, V]: in so many drawn texts.

    likeliest: of each depth, whether children are the likeliest tokens, accepted if the target samples them
    """
    noise = torch.Generator().manual_seed(seed)
    of_language = torch.arange(len(target)).repeat_interleave(texts)
    older, last = torch.zeros(2, len(of_language), dtype=torch.long)
    found = []
    for each, certain in zip(head.unbind(1), likeliest, strict=True):
        laws, drafted = target[of_language, older, last], each[of_language, older, last]
        order = drafted.argsort(1, descending=True) if certain else drawn_order(drafted, noise)
        accepted = laws.gather(1, order) if certain else chain_acceptance(laws, drafted, order)
        found.append(accepted.view(len(target), texts, -1).mean(1))
        older, last = last, laws.multinomial(1, generator=noise)[:, 0]
    return torch.stack(found, 1)


def drawn_order(laws: Tensor, noise: torch.Generator) -> Tensor:
    """All tokens in the order in which they are drawn without replacement from laws [B, V]."""
    gumbels = -torch.empty_like(laws).exponential_(generator=noise).log()
    return (laws.clamp_min(TINY).log() + gumbels).argsort(1, descending=True)


def grown(
    head: Tensor, nodes: int, trees: int, likeliest: Sequence[bool], seed: int, accepts: Tensor | None = None
) -> Trees:
    """`trees` trees of each language, of so many nodes and the root, by the laws [L, D, V, V, V] of a head.

    likeliest: of each depth, whether its tokens are the likeliest ones
    accepts:   [L, D, V], what children are worth by depth and rank. Without it one of the likeliest tokens is worth its
               probability, and the next one to be drawn what is left of the law
    """
    count, levels, tokens = head.shape[0], head.shape[1], head.shape[-1]
    noise, rows = torch.Generator().manual_seed(seed), torch.arange(count * trees)
    of_language, certain = rows // trees, torch.tensor([*likeliest, True])
    size = (len(rows), nodes + 1)
    parents, ranks, depths, children = (torch.zeros(size, dtype=torch.long) for _ in range(4))
    context, order = (torch.zeros(*size, each, dtype=torch.long) for each in (2, tokens))
    laws, values, worth = torch.zeros(*size, tokens).double(), torch.ones(size).double(), torch.zeros(size).double()

    def weigh(node: Tensor) -> None:
        """Note what the next child of a node is worth, before it is drawn: -1 where there can be none."""
        depth, rank = depths[rows, node], children[rows, node]
        in_order = laws[rows, node].gather(1, order[rows, node])
        left = (in_order * (torch.arange(tokens) >= rank[:, None])).sum(1)
        at = depth.clamp(max=levels - 1), rank.clamp(max=tokens - 1)
        own = torch.where(certain[depth], in_order[rows, at[1]], left) if accepts is None else accepts[of_language, *at]
        worth[rows, node] = (values[rows, node] * own).masked_fill((depth == levels) | (rank == tokens), -1)

    for node in range(nodes + 1):
        if node:
            parent = worth.argmax(1)
            depth, rank = depths[rows, parent], children[rows, parent]
            token = order[rows, parent, rank]
            by_law = values[rows, parent] * laws[rows, parent, token]
            values[:, node] = by_law if accepts is None else worth[rows, parent]
            parents[:, node], ranks[:, node], depths[:, node] = parent, rank, depth + 1
            context[:, node] = torch.stack([context[rows, parent, 1], token], 1)
            children[rows, parent] += 1
            weigh(parent)
        depth, (older, last) = depths[:, node], context[:, node].unbind(1)
        laws[:, node] = head[of_language, depth.clamp(max=levels - 1), older, last]
        in_turn, drawn = laws[:, node].argsort(1, descending=True), drawn_order(laws[:, node], noise)
        order[:, node] = torch.where(certain[depth][:, None], in_turn, drawn)
        weigh(torch.full_like(rows, node))
    drawn = order.masked_fill(torch.arange(tokens) >= children[..., None], -1)
    return Trees(parents, ranks, context, drawn, laws, certain[depths])


def tree_accepts(target: Tensor, trees: Trees, rejection: bool) -> Tensor:
    """Tokens [L] that a step accepts on average, for each language; by rejection, or by a sample of the target."""
    batch, nodes = trees.parents.shape
    of_language = torch.arange(batch) // (batch // len(target))
    laws = target[of_language[:, None], trees.context[..., 0], trees.context[..., 1]]  # [B, N, V]
    chance = torch.where(trees.drawn >= 0, laws.gather(2, trees.drawn.clamp_min(0)), 0)
    if rejection:
        most = int((trees.drawn >= 0).sum(-1).max())
        tried = chain_acceptance(laws.flatten(0, 1), trees.laws.flatten(0, 1), trees.drawn[..., :most].flatten(0, 1))
        tried = torch.nn.functional.pad(tried.view(batch, nodes, -1), (0, laws.shape[-1] - most))
        chance = torch.where(trees.likeliest[..., None], chance, tried)
    reached, rows = torch.ones(batch, nodes, dtype=torch.float64), torch.arange(batch)
    for node in range(1, nodes):
        parent = trees.parents[:, node]
        reached[:, node] = reached[rows, parent] * chance[rows, parent, trees.ranks[:, node]]
    return (reached.sum(1) - 1).view(len(target), -1).mean(1)


def rows_of(
    kinds: Sequence[str], count: int, trees: int, cases: Sequence[tuple[float, float, int, int]], tokens: int, seed: int
) -> Iterator[Row]:
    """A row for each kind of language, law of the head and case."""
    for kind, laws, (overlap, temperature, nodes, levels) in product(kinds, LAWS, cases):
        language = languages(count, KINDS[kind], seed, tokens).softmax(-1)
        head = laws_of_head(language, laws, levels, error_of(language, overlap, seed + 1), seed + 1)
        found = accepted_of(tempered(language, temperature), head, temperature, nodes, trees, seed + 2)
        ways = {way: found.pop(way) for way in [*found] if isinstance(way, tuple)}
        row: Row = {"language": kind, "laws": laws, "overlap": overlap, "temperature": temperature}
        row |= {"nodes": nodes, "levels": levels} | {name: _mean(accepted) for name, accepted in found.items()}
        if ways:
            best = max(ways, key=lambda way: float(ways[way][1::2].mean()))
            counted = {"likeliest": found["likeliest"], "planned": ways[1.0, 1.0], "sharpened": ways[best]}
            row |= {"sharper": [*best], "even": {name: _mean(each[::2]) for name, each in counted.items()}}
        row["errors"] = {name: round(float(each.std()) / math.sqrt(count), 3) for name, each in found.items()}
        tree = max(row["likeliest"], row["fixed"], row.get("planned", 0.0))
        yield row | {"ratio": round((1 + tree) / (1 + row["chain"]), 3)}


def accepted_of(
    target: Tensor, head: Tensor, temperature: float, nodes: int, trees: int, seed: int
) -> dict[str | tuple[float, float], Tensor]:
    """Accepted tokens [L] of each way, and of each pair of temperatures. head: its laws at temperature 1."""
    levels = head.shape[1]

    def planned(first: float, below: float) -> Tensor:
        sharper = [first] + [below] * (levels - 1)
        laws = torch.stack([tempered(law, each or 1.0) for law, each in zip(head.unbind(1), sharper, strict=True)], 1)
        likeliest = [each == 0 for each in sharper]
        accepts = acceptance(target, laws, likeliest, TEXTS, seed)
        found = grown(laws, nodes - 1, trees if first else 1, likeliest, seed + 1, accepts)
        return tree_accepts(target, found, rejection=True)

    def of_likeliest() -> Tensor:
        return tree_accepts(target, grown(head, nodes - 1, 1, [True] * levels, seed), rejection=False)

    if not temperature:
        return {"chain": chain_accepts(target, head, False), "likeliest": of_likeliest(), "fixed": planned(0.0, 0.0)}
    head = tempered(head, temperature)
    chains = [chain_accepts(target, head, taken) for taken in (False, True)]
    drawn = grown(head, nodes - 1, trees, [False] * levels, seed + 1)
    ways = {way: planned(*way) for way in product(SHARPER, SHARPER) if way[0] >= way[1]}
    return {
        "chain": max(chains, key=lambda each: float(each.mean())),
        "likeliest": of_likeliest(),
        "naive": tree_accepts(target, drawn, rejection=False),
        "rejection": tree_accepts(target, drawn, rejection=True),
        "fixed": ways[0.0, 0.0],
        "planned": ways[1.0, 1.0],
        "mixed": ways[1.0, 0.0],
        **ways,
    }


def _mean(accepted: Tensor) -> float:
    return round(float(accepted.mean()), 3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--languages", type=int, default=30, help="of each kind, at least 2")
    parser.add_argument("--trees", type=int, default=20, help="that are drawn of each language")
    parser.add_argument("--seed", type=int, default=0)
    given = options_of(parser, argv, languages=2, trees=2)
    if given.languages < 2 or given.trees < 1:
        parser.error("expected at least 2 languages and 1 tree")
    cases, tokens = CASES, TOKENS
    if given.miniature:
        tokens = 4
        cases = [(overlap, temperature, 4, 2) for overlap, temperature, _, _ in CASES]
    facts = environment("cpu", given, "languages", "trees", "seed")
    rows = rows_of(given.kinds, given.languages, given.trees, cases, tokens, given.seed)
    report(rows, facts, given.json, without=("errors",), title="accepted tokens a step")


if __name__ == "__main__":
    main()
