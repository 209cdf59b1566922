"""The parts of papers.py that repeat ERSD (Kobus and Gündüz 2025, arXiv 2504.15475).

GSD is greedy rejection of children drawn without replacement, ERSD the race of children drawn by the target's noise.
"""

import math
from collections.abc import Sequence

import torch
from batches import jackknife
from bounds import tree_bounds
from papers_setting import Row, Setting
from races import entropy_bounds, matching, overlap, race_acceptance, race_index_entropy
from rejection import rounds_rejection
from sequoia import compared, falling, planning_vector
from torch import Tensor

from heavypath.speculative import TokenTree, expected_tokens, greedy_tree
from heavypath.speculative.trees.planning import node_probabilities

RACES = 16


def places(setting: Setting, temperature: float) -> Tensor:
    """How often the target's token is the draft's arrival 1, 2, ... among distinct tokens: [V], which sums to 1."""
    laws = setting.laws(temperature)
    target, draft = (torch.cat(each) for each in zip(*laws, strict=True))
    generator, counts = torch.Generator().manual_seed(setting.seed), torch.zeros(target.shape[1], dtype=torch.float64)
    for _ in range(RACES):
        arrivals = torch.empty_like(target).exponential_(generator=generator)
        times, winner = arrivals / draft, (arrivals / target).argmin(1, keepdim=True)
        counts += torch.bincount((times < times.gather(1, winner)).sum(1), minlength=len(counts)) / RACES
    return counts / len(target)


def fixed(law: Sequence[float], size: int, parts: int) -> float:
    """Lemma 4.2 with a fixed v: children that the best tree lacks count as `parts` equal ones.

    log(n (I + v - 1) + 1) / (H_I + r log v), where the best tree has children up to I, and the others the sum r.
    """
    kept = torch.tensor(law[: 1 + int(greedy_tree(law, size).ranks.max())], dtype=torch.float64)
    rest = max(1e-12, 1 - float(kept.sum()))
    entropy = float(torch.special.entr(kept).sum()) + rest * math.log(parts / rest)
    return math.log(size * (len(kept) + parts - 1) + 1) / entropy


def bounds(setting: Setting) -> Row:
    """Theorem 4.1 and lemma 4.2 for the race: the best tree, the paper's bound, and those with v fixed and chosen."""
    law, vocabulary = falling(places(setting, 0.6)), setting.pair.target.config.vocab_size
    entropy, rows = float(torch.special.entr(torch.tensor(law)).sum()), []
    for size in [2**power for power in range(2, 13, 2)]:
        least = tree_bounds(law, size)
        row = {"best tree": expected_tokens(greedy_tree(law, size), law), "v = 1": fixed(law, size, 1)}
        row |= {"v = 100": fixed(law, size, 100), "least v": least.merged, "least of all": least.least}
        row |= {"theorem 4.1": (math.log(size) + math.log(vocabulary)) / entropy}
        rows.append({"nodes": size} | {name: round(each, 4) for name, each in row.items()})
    return {"rows": rows}


def shapes(vector: Sequence[float], size: int) -> dict[str, TokenTree]:
    """A batch, a sequence, SpecInfer's 1, 1, 3, 1, ... and the best tree, of at most `size` nodes."""
    found = {"batch": TokenTree.independent(size - 1, 1), "sequence": TokenTree.chain(size - 1)}
    if size >= 8:
        found["1,1,3,1.."] = TokenTree.from_branching([1, 1, 3, *[1] * (size // 3 - 2)])
    return found | {"best tree": greedy_tree(vector, size)}


def growth(setting: Setting) -> Row:
    """Figure 3: tokens by vectors and exact ones, by shape and by rule, and what the best tree has over the others."""
    laws = {"GSD": planning_vector(setting, 0.6), "ERSD": falling(places(setting, 0.6))}
    rows = []
    for size in (4, 8) if setting.small else (8, 64):
        for rule, vector in laws.items():
            ways = {
                name: ("sequoia" if rule == "GSD" else "ersd", {"tree": tree})
                for name, tree in reversed(shapes(vector, size).items())  # the best one first
            }
            for row in compared(setting, ways, contexts=4):
                vectors = round(expected_tokens(ways[row["way"]][1]["tree"], vector), 4)
                rows.append(row | {"nodes": size, "rule": rule, "tree": row["way"], "expected": vectors})
    return {"rows": rows}


def marginals(setting: Setting) -> Row:
    """Figure 4: what one more node brings the best tree, and the same of lemma 4.2's bound with a fixed v of 1.

    slope: of log marginal on log n, by least squares over these sizes; -1 where a node brings as 1 / n
    """
    laws = {"GSD": planning_vector(setting, 0.6), "ERSD": falling(places(setting, 0.6))}
    sizes, rows = [2**power for power in range(3, 6 if setting.small else 12)], []
    slopes = {}
    for rule, vector in laws.items():
        largest = greedy_tree(vector, sizes[-1] + 1)
        gains = node_probabilities(largest, vector).sort(descending=True).values.tolist()
        for size in sizes:
            bound = fixed(vector, size + 1, 1) - fixed(vector, size, 1)
            rows.append({"rule": rule, "nodes": size, "brings": round(gains[size], 6), "bound": round(bound, 6)})
        x, y = torch.tensor(sizes).double().log(), torch.tensor([gains[size] for size in sizes]).log()
        slopes[rule] = round(float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()), 4)
    return {"rows": rows, "slopes": slopes}


def entropy(setting: Setting) -> Row:
    """Equations 6 to 8, lemma 3.1 and appendix B: bits of the index by greedy rejection and by races, and their bounds.

    Lemma 3.1, D and (8) count every position. Equation 7 (Harsha et al.) bounds greedy rejection by
    D + (1 + e) log(D + 1) + O(1). Its index K counts independent draws, and P(K > k) is the rejection rate of k
    children. Where a thousand of them leave more than 0.001, the law of K is not known to its end: these positions are
    left out of "H greedy", "D of these" and "constant of (7)", which is the most that H exceeds the rest, e = 0.
    """
    rows = []
    for temperature in (0.6, 1.0):
        target, draft = (torch.cat(each)[::4] for each in zip(*setting.laws(temperature), strict=True))
        limits = entropy_bounds(target, draft)
        values = {
            "D": limits.lower, "upper": limits.upper,
            "H race": torch.tensor([float(race_index_entropy(*each)) for each in zip(target, draft, strict=True)]),
            "overlap": overlap(target, draft), "race": race_acceptance(target, draft),
            "lemma 3.1": matching(target, draft),
        }  # fmt: skip
        most, least = (64, 1.0) if setting.small else (1024, 1e-3)
        rates = torch.cat([target.new_ones(len(target), 1), rounds_rejection(target, draft, most)], 1)
        kept = rates[:, -1] < least
        rates, divergence = rates[kept], limits.lower[kept]
        mass = torch.cat([-rates.diff(dim=1), rates[:, -1:]], 1).clamp(min=0)
        greedy = torch.special.entr(mass).sum(1) / math.log(2)
        row = {"temperature": temperature, "positions": len(target), "of greedy rejection": len(greedy)}
        row |= {name: round(float(each.mean()), 4) for name, each in values.items()}
        row |= {"H greedy": round(float(greedy.mean()), 4), "D of these": round(float(divergence.mean()), 4)}
        row["constant of (7)"] = round(float((greedy - divergence - (divergence + 1).log2()).max()), 4)
        rows.append(row)
    return {"rows": rows}


def one_vector(setting: Setting) -> Row:
    """Section 5: expected tokens of sequences, less what the acceptance of their first token alone predicts.

    Both are exact after the same contexts. The prediction has the same rate a at every depth and after every context,
    1 + a + a^2 + ...; the error takes prompts as the units.
    """
    rows = []
    for temperature in (0.6, 1.0):
        first = setting.evaluate("chain", temperature=temperature, contexts=12, tree=TokenTree.chain(1)).tokens - 1
        for length in (2, 4) if setting.small else (4, 16, 30):
            tree = TokenTree.chain(length)
            found = setting.evaluate("chain", temperature=temperature, contexts=12, tree=tree)

            def more(kept: Tensor, tree: TokenTree = tree, first: Tensor = first, own: Tensor = found.tokens) -> float:
                return float(own[kept].mean()) - expected_tokens(tree, [float(first[kept].mean())])

            predicted = expected_tokens(tree, [float(first.mean())])
            row = {"temperature": temperature, "length": length, "first": round(float(first.mean()), 4)}
            row |= {"predicted": round(predicted, 4), **found.row}
            rows.append(row | {"over predicted": [round(each, 4) for each in jackknife(more, len(first))]})
    return {"rows": rows}


PARTS = {
    "ersd-bounds": bounds, "ersd-entropy": entropy, "ersd-one-vector": one_vector, "ersd-growth": growth,
    "ersd-marginals": marginals,
}  # fmt: skip
