"""The launches of a verification on a GPU.

A first launch decides for all nodes at once (`decision`, or `nucleus` for one token per node), and a second one walks
down from the root (`walk`). A method that looks at the whole tree has launches of its own (`traversal_kernel`).
"""

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import VERIFICATION_RULES, Verified, VerifyInputs
from heavypath.kernels.noise import Noise, Stream
from heavypath.kernels.nucleus import launch_tokens
from heavypath.kernels.verifying.decision import Decided, decide
from heavypath.kernels.verifying.drafted_tree import laid_out
from heavypath.kernels.verifying.walk import launch_walk


def verify(inputs: VerifyInputs) -> Verified:
    """Verify as `verification.reference`.

    It takes two launches (`launch_traversal` for rules that look at the whole tree), and one more for each of target
    and draft that has filters.
    """
    inputs, method = laid_out(inputs), inputs.method
    draft = inputs.draft_logits
    seed, rows = inputs.noise
    rule = VERIFICATION_RULES[method]
    if rule.whole_tree and draft is not None:  # without, the tree is its root, and the token is drawn from P
        from heavypath.kernels.verifying.traversal_kernel import launch_traversal  # which other methods do not need

        return launch_traversal(inputs)
    if rule.draft_aware:
        return launch_walk(inputs, decide(inputs))
    winner, _, _ = launch_tokens(
        inputs.target_logits.reshape(-1, inputs.target_logits.shape[-1]),
        1,
        Filters(temperature=0.0) if method == "greedy" else inputs.target_filters,
        noise=Noise(seed, None if rows is None else rows.view(-1)),
        stream=Stream.DRAFT if method == "race" else Stream.TARGET,
    )
    return launch_walk(inputs, Decided(winner, left_out=None, facts=None, marks=None))
