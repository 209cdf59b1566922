"""Logits processors in trees: those of transformers, a user's callables, and grammars.

A processor maps a sequence and the logits after it to other logits. In a step it is called for each node of the tree,
with the sequence that ends at this node: the prompt as it was given, the new tokens, and the drafted tokens on the path
to the node. Let p be its result for the target's logits after a node, and q its result for the draft's logits. Then

    children are drawn from q,    and verified as draws of q against p

so for any draft the output has the distribution of the processed target. As the same tokens are masked in p and q, few
nodes are rejected because of a mask.
"""
