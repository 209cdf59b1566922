"""Speculative decoding with a tree of drafted tokens.

Sequoia (Chen et al. 2024, arXiv 2402.12374), algorithm 2. The shape of the tree is planned before (section 3.1, see
`speculative/trees/planning.py`). The root is the last token of the prefix. After a node, P is the target's distribution
of the next token, and Q the draft's. One step:

    1. Draft:   level by level, the children x_1, x_2, ... of each node ~ Q without replacement.
    2. Score:   one forward pass of the target on prefix and tree gives P after each node.
                A node attends to the prefix, to its ancestors and to itself.
    3. Verify:  from the root down. At a node, for x_1, x_2, ...
                    accept x_j with probability min(1, P(x_j) / Q(x_j)), and go on at x_j;
                    if it is rejected,  P <- norm(max(P - Q, 0)),  Q(x_j) <- 0,  Q <- norm(Q).
    4. Sample:  where no child is accepted, one more token ~ P.

Each new token follows P exactly: x_j is a sample of the Q that it is compared with. So, as in `chain.py`, a rejection
leaves the residual distribution to be sampled, and that is the P for the next child.

Where Q has no mass left, the paper samples uniformly. That does not happen here: logits are finite, and Q is
softmax(logits), with -inf for rejected tokens.
"""

from typing import Any

import torch
from torch import Tensor

from heavypath.kernels.noise import Stream
from heavypath.speculative.reference.chain import ROWS_PER_STEP, residual, sample, uniform, with_temperature


@torch.no_grad()
def tree_decode(
    target: Any,
    draft: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    parents: list[int],
    temperature: float = 1.0,
    seed: int = 0,
) -> Tensor:
    """Continue a prompt LongTensor[1, T] to LongTensor[1, T + max_new_tokens]; temperature 0 is greedy.

    target, draft: causal language models of transformers that take a 4D attention mask, with one vocabulary
    parents: of the N nodes; parents[0] = -1 and parents[i] < i. Siblings are drafted in the order of their numbers.
    """
    children = [[i for i, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    prefix = input_ids[0]
    end = len(prefix) + max_new_tokens
    while len(prefix) < end:
        first_row = ROWS_PER_STEP * (len(prefix) - 1)

        # 1. Draft. Node 0 is the root; tokens of nodes below the level mean nothing yet.
        tokens = prefix[-1:].repeat(len(parents))  # [N]
        draft_logits = torch.empty(len(parents), 0, device=prefix.device)
        level = [0]
        while any(children[node] for node in level):
            draft_logits = with_temperature(tree_logits(draft, prefix, tokens, parents), temperature)  # [N, V]
            for node in level:
                count = len(children[node])
                tokens[children[node]] = sample(draft_logits[node], seed, Stream.DRAFT, first_row + node, count)
            level = [child for node in level for child in children[node]]

        # 2. Score.
        target_logits = with_temperature(tree_logits(target, prefix, tokens, parents), temperature)  # [N, V]

        # 3. Verify.
        max_length = end - len(prefix)  # of the path: the step ends with one more token
        path, next_probs = verify(tokens, children, target_logits, draft_logits, max_length, seed, first_row)

        # 4. Sample.
        next_token = sample(next_probs.log(), seed, Stream.TARGET, first_row + path[-1])
        prefix = torch.cat([prefix, tokens[path[1:]], next_token])
    return prefix[None]


def verify(
    tokens: Tensor,
    children: list[list[int]],
    target_logits: Tensor,
    draft_logits: Tensor,
    max_length: int,
    seed: int,
    first_row: int,
) -> tuple[list[int], Tensor]:
    """The path of accepted nodes, which begins with the root, and the distribution [V] of the token after it."""
    path = [0]
    while True:
        node = path[-1]
        target_probs = torch.softmax(target_logits[node], -1)  # P
        logits = draft_logits[node].clone()
        offered = children[node] if len(path) < max_length else []
        for j, child in enumerate(offered):
            token = tokens[child]
            draft_probs = torch.softmax(logits, -1)  # Q
            if uniform(seed, first_row + node, j) < target_probs[token] / draft_probs[token]:
                path.append(child)
                break
            target_probs = residual(target_probs, draft_probs)
            logits[token] = -torch.inf
        else:
            return path, target_probs


def tree_logits(model: Any, prefix: Tensor, tokens: Tensor, parents: list[int]) -> Tensor:
    """Logits [N, V] after the nodes of a tree, by one forward pass on the prefix [T], whose last token is the root."""
    before = len(prefix) - 1
    length = before + len(parents)
    attends = torch.ones(length, length, dtype=torch.bool, device=prefix.device).tril()
    attends[before:, before:] = torch.eye(len(parents), dtype=torch.bool, device=prefix.device)
    for node in range(1, len(parents)):
        attends[before + node] |= attends[before + parents[node]]
    mask = torch.zeros(length, length, dtype=model.dtype, device=prefix.device).masked_fill(~attends, -torch.inf)
    ids = torch.cat([prefix[:-1], tokens])  # [T - 1 + N]
    positions = attends.sum(-1) - 1
    outputs = model(ids[None], attention_mask=mask[None, None], position_ids=positions[None], use_cache=False)
    return outputs.logits[0, before:]
