"""Policies of trees that tests put in the place of a decoder's own."""

import random

from heavypath.speculative.adapting import Adapting
from heavypath.speculative.tree_policy import TreePolicy, TreesByBatch


class Scripted(TreePolicy):
    """Begins with the first of some trees; `next_tree` gives that of each later step.

    chosen: the trees of later steps, so far
    """

    def __init__(self, trees, next_tree):
        self.trees, self.next_tree, self.chosen = trees, next_tree, []

    def by_batch(self, filters, most, rests=True):
        return TreesByBatch(dict(enumerate(self.trees, 1)))

    def candidates(self, filters, batch):
        return tuple(self.trees)

    def tree(self, filters, running):
        return self.trees[0]

    def watcher(self, plan, filters, batch):
        self.chosen = []

        def choose(running, steps, counts):
            self.chosen.append(self.next_tree())
            return self.chosen[-1]

        return Adapting(choose, plan.tree)


def at_random(trees, seed=0):
    """The smallest among them, in any order."""
    turns = random.Random(seed)
    return Scripted(trees, lambda: turns.choice(trees))
