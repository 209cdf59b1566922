"""The parts of papers.py that repeat ERSD (Kobus and Gündüz 2025, arXiv 2504.15475).

GSD is greedy rejection of children drawn without replacement, ERSD the race of children drawn by the target's noise.
"""

import math
from collections.abc import Sequence

import torch
from batches import Counts, jackknife
from bounds import tree_bounds
from papers_setting import Row, Setting
from races import entropy_bounds, overlap, race_acceptance, race_acceptance_bound, race_index_entropy
from rejection import rounds_rejection
from sequoia import falling, vectors
from torch import Tensor

from heavypath.speculative import TokenTree, expected_tokens, greedy_tree

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
    """Figures 3 and 4: expected and decoded tokens by shape and by rule, and what twice the nodes bring."""
    laws = {"GSD": falling(vectors(setting, 0.6)["sequoia"].mean(0)), "ERSD": falling(places(setting, 0.6))}
    rows, before = [], {}
    for size in (4, 8) if setting.small else (8, 16, 32, 64):
        for rule, vector in laws.items():
            for name, tree in shapes(vector, size).items():
                found = setting.decode("sequoia" if rule == "GSD" else "ersd", tree=tree, tokens=48)
                row = {"nodes": size, "rule": rule, "tree": name, "expected": round(expected_tokens(tree, vector), 4)}
                now, last = (row["expected"], found.row["tokens"]), before.get((rule, name))
                if last:
                    row["twice the nodes"] = [round(each - other, 4) for each, other in zip(now, last, strict=True)]
                before[rule, name] = now
                rows.append(row | found.row)
    return {"rows": rows}


def entropy(setting: Setting) -> Row:
    """Equations 6 to 8, lemma 3.1 and appendix B: bits of the index by greedy rejection and by races, and their bounds.

    Equation 7 (Harsha et al.) bounds greedy rejection by D + (1 + e) log(D + 1) + O(1). Its index K counts independent
    draws, and P(K > k) is the rejection rate of k children. Positions where a thousand of them leave more than 0.001
    are left out: there the law of K is not known to its end. The constant is the most that H exceeds the rest, e = 0.
    """
    rows = []
    for temperature in (0.6, 1.0):
        target, draft = (torch.cat(each)[::4] for each in zip(*setting.laws(temperature), strict=True))
        seen, most = len(target), 64 if setting.small else 1024
        rates = torch.cat([target.new_ones(seen, 1), rounds_rejection(target, draft, most)], 1)
        kept = rates[:, -1] < (1 if setting.small else 1e-3)
        target, draft, rates = target[kept], draft[kept], rates[kept]
        mass, limits = torch.cat([-rates.diff(dim=1), rates[:, -1:]], 1).clamp(min=0), entropy_bounds(target, draft)
        greedy = torch.special.entr(mass).sum(1) / math.log(2)
        values = {
            "D": limits.lower, "H greedy": greedy, "finer": limits.finer, "upper": limits.upper,
            "H race": torch.tensor([float(race_index_entropy(*each)) for each in zip(target, draft, strict=True)]),
            "overlap": overlap(target, draft), "race": race_acceptance(target, draft),
            "lemma 3.1": (target * draft / (target + draft).clamp(min=1e-300)).sum(1),
            "larger bound": race_acceptance_bound(target, draft),
        }  # fmt: skip
        row = {"temperature": temperature, "positions": len(target), "of": seen}
        row |= {name: round(float(each.mean()), 4) for name, each in values.items()}
        row["below D"] = int((greedy < limits.lower - 0.02).sum())
        rows.append(
            row | {"constant of (7)": round(float((greedy - limits.lower - (limits.lower + 1).log2()).max()), 4)}
        )
    return {"rows": rows}


def one_vector(setting: Setting) -> Row:
    """Section 5: sequences as decoded, less what one acceptance rate for all depths and texts expects.

    The rate is that of the first child on texts that the target wrote after the same prompts. The error is of the
    difference, with the prompts as units.
    """
    rows = []
    for temperature in (0.6, 1.0):
        first = vectors(setting, temperature)["sequoia"][:, 0]
        for length in (2, 4) if setting.small else (4, 16):
            tree = TokenTree.chain(length)
            found = setting.decode("chain", tree=tree, temperature=temperature)
            own = Counts.of(found.stats)

            def more(kept: Tensor, tree: TokenTree = tree, first: Tensor = first, own: Counts = own) -> float:
                return own.per_forward(kept) - expected_tokens(tree, [float(first[kept].mean())])

            row = {"temperature": temperature, "length": length, "acceptance": round(float(first.mean()), 4)}
            row |= {"expected": round(expected_tokens(tree, [float(first.mean())]), 4), **found.row}
            row["by depth"] = [round(each, 3) for each in found.stats.acceptance_by_depth[:8]]
            rows.append(row | {"over expected": [round(each, 4) for each in jackknife(more, len(first))]})
    return {"rows": rows}


PARTS = {"ersd-bounds": bounds, "ersd-entropy": entropy, "ersd-one-vector": one_vector, "ersd-growth": growth}
