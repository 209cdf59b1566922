"""How much of what is possible each verifier accepts: whole trees over tiny vocabularies, against the optimum.

For random target and draft laws and a static tree, all trees that can be drawn are listed. A verifier is, for each of
them, a law over which node the path ends at and which token follows. It is lossless iff for every text w of length
L = depth + 1

    sum_D p(D) sum_s x[D, s] P(w behind s) = P(w)            s: the tokens emitted, a beginning of w

so the most tokens that any lossless verifier has is a linear programme, in x[D, s] >= 0 with sum_s x[D, s] = 1. Beside
it: the rules of `verify_tree`, in the exact form of tests/support/verification_oracle.py. "Gap closed" is the part of
the way from recursive rejection to the optimum, a mean over the random laws.

Sources: Sun et al. 2023 (SpecTr, sec. 3), for one node, the optimal transport; the programme for whole trees is ours.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from common import argument_parser, environment, write_results
from rich import box
from rich.console import Console
from rich.table import Column, Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

import verification_oracle as oracle

SHAPES = {
    "chain of 2": [-1, 0, 1],
    "two children": [-1, 0, 0],
    "two sequences of 2": [-1, 0, 0, 1, 2],
    "binary, 2 levels": [-1, 0, 0, 1, 1, 2, 2],
}
VERIFIERS = ("rejection", "traversal", "held", "held_traversal")


def optimum(language: oracle.Language, parents: Sequence[int]) -> float:
    """The most tokens a step that a lossless verifier of this tree has, for draws without replacement."""
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    trees = [*oracle.drawn(language, oracle.static(parents), ())]
    depth = max(len(tree.context(node)) for tree, _ in trees for node in range(len(parents)))
    target = oracle.target_law(language, (), depth + 1)
    text_row = {text: row for row, text in enumerate(target)}
    rows, columns, values, gains = [], [], [], []
    for number, (tree, probability) in enumerate(trees):
        for node in range(len(parents)):
            if not tree.present(node):
                continue
            for token in range(language.vocab_size):
                emitted = (*tree.context(node), token)
                column = len(gains)
                gains.append(-float(probability) * len(emitted))
                rows.append(len(target) + number)
                columns.append(column)
                values.append(1.0)
                rest = oracle.target_law(language, emitted, depth + 1 - len(emitted))
                for end, chance in rest.items():
                    text = (*emitted, *end)
                    rows.append(text_row.get(text, len(target) + len(trees)))  # the last row: texts that never are
                    columns.append(column)
                    values.append(float(probability * chance))
    right = np.array([*map(float, target.values()), *[1.0] * len(trees), 0.0])
    matrix = coo_array((values, (rows, columns)), shape=(len(right), len(gains))).tocsr()
    found = linprog(gains, A_eq=matrix, b_eq=right, bounds=(0, None), method="highs")
    assert found.status == 0, found.message
    return -found.fun


def accepted(name: str, language: oracle.Language, parents: Sequence[int]) -> float:
    """Tokens a step of one of VERIFIERS, exactly."""
    verifier = getattr(oracle, name)
    tokens = 0.0
    for tree, probability in oracle.drawn(language, oracle.static(parents), ()):
        verdict = verifier(language, tree, (), False)
        tokens += float(probability * sum(chance * (len(path) + 1) for (path, _), chance in verdict.items()))
    return tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argument_parser(__doc__, threads=False)
    parser.add_argument("--laws", type=int, default=20, help="random pairs of laws")
    parser.add_argument("--vocabulary", type=int, default=3)
    arguments = parser.parse_args(argv)
    if arguments.miniature:
        arguments.laws = 1
    table = Table(Column("tree", no_wrap=True), box=box.SIMPLE_HEAD, title="tokens a step, and gap closed")
    for heading in (*VERIFIERS, "optimum"):
        table.add_column(heading.replace("_", " "), justify="right")
    results: dict[str, dict[str, Any]] = {}
    console = Console(highlight=False, width=110)
    with console.status("") as status:
        for shape, parents in SHAPES.items():
            found: dict[str, list[float]] = {name: [] for name in (*VERIFIERS, "optimum")}
            for seed in range(arguments.laws):
                status.update(f"{shape}: {seed} of {arguments.laws} pairs of laws")
                language = oracle.Language(arguments.vocabulary, seed)
                found["optimum"].append(optimum(language, parents))
                for name in VERIFIERS:
                    found[name].append(accepted(name, language, parents))
            means = {name: mean(values) for name, values in found.items()}
            gap = means["optimum"] - means["rejection"]
            results[shape] = {
                name: {"tokens": value, "gap_closed": (value - means["rejection"]) / gap if gap > 1e-9 else None}
                for name, value in means.items()
            }
            table.add_row(
                shape,
                *(
                    f"{each['tokens']:.3f}" + ("" if each["gap_closed"] is None else f" ({each['gap_closed']:.0%})")
                    for each in results[shape].values()
                ),
            )
    console.print(table)
    write_results(
        arguments.json,
        environment("cpu") | {"laws": arguments.laws, "vocabulary": arguments.vocabulary},
        shapes=results,
    )


if __name__ == "__main__":
    main()
