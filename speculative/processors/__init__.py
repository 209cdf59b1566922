"""Logits processors along every path of a drafted tree: transformers' own, callables of a user, and grammars.

A processor maps a text and the logits after it to other logits. In a step it is asked for each node of the tree, with
that node's own text. This is the prompt as it was given, the new tokens, and the drafted ones from the root's child
down to the node. With p its result on the target's logits after a node and q on the draft's,

    children are drawn from q,    and verified as draws of q against p

so the text follows the law of the processed target for any draft, and where both are masked alike little is rejected.
"""
