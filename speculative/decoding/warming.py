"""Warming up: what the first texts would do besides decoding, done before there are any."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from heavypath.kernels.compiling import compile_all, uncompiled_launches
from heavypath.speculative.decoding.drafted import no_lap
from heavypath.speculative.decoding.drafters import Shape
from heavypath.speculative.decoding.graphs import is_ours
from heavypath.speculative.decoding.request import Request
from heavypath.speculative.decoding.runner import StepRunner
from heavypath.speculative.decoding.step import StepPlan
from heavypath.speculative.decoding.workspace import Workspace


def warm_up_steps(
    runner: StepRunner,
    plan: StepPlan,
    workspace: Workspace,
    batch: int,
    longest: int,
    tree_of: Callable[[int], Shape] | None,
) -> None:
    """Run each step that a batch may take, twice: a step is run once before it is captured.

    longest: as of `StepRunner.run`
    tree_of: the tree of so many sequences, beside the root; None for any of the plan's
    """
    sizes = [batch, *(1 << power for power in reversed(range((batch - 1).bit_length())))]
    for each in plan.each():
        own = [size for size in sizes if tree_of is None or len(each.tree) == 1 or tree_of(size) == each.tree]
        if own:
            step = runner.step(each, each.tree.depth)
            launch = partial(step, *workspace.first(own[0]), workspace.most_visible(each))
            workspace.launcher.prepare(step, launch)
        for slots in own * 2:
            runner.run(each, workspace, slots=slots, levels=each.tree.depth, longest=longest, lap=no_lap)


def compile_prompts(request: Request, plan: StepPlan, workspace: Workspace) -> None:
    """Compile side by side what prompts of any length launch, up to those of a request.

    Attention has a variant for every power of two or so of a piece's tokens. Launches that would compile are left out,
    so what is in the workspace afterwards means nothing. Where graphs are not prepared, nothing is done.
    """
    if not is_ours(plan):
        return
    most = request.prompt.shape[1] - 1
    with uncompiled_launches() as compilations:
        for tokens in (*(1 << power for power in range(most.bit_length())), most):
            prompt = request.prompt[:, : tokens + 1]
            workspace.begin(replace(request, prompt=prompt, lengths=torch.full_like(prompt[:, 0], tokens + 1)), plan)
    compile_all(compilations, plan.target.device)
