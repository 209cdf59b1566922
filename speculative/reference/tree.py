"""Speculative decoding with a tree of drafted tokens.

Algorithm 2 of Chen et al. 2024, "Sequoia" (arXiv 2402.12374), with a tree of fixed shape, as `sequoia_tree` plans it
(section 3.1). The root of the tree is the last token of the prefix. At each node, P is the target's distribution of the
next token, and Q the draft's. One step:

    1. Draft:   level by level, the children x_1, x_2, ... of each node ~ Q without replacement.
    2. Score:   one forward pass of the target on prefix and tree gives P at each node.
                A node attends to the prefix, to its ancestors and to itself.
    3. Verify:  from the root down. At each node, for x_1, x_2, ...
                    accept x_j with probability min(1, P(x_j) / Q(x_j)), and continue at x_j;
                    if it is rejected,  P <- norm(max(P - Q, 0)),  Q(x_j) <- 0,  Q <- norm(Q).
    4. Sample:  one more token ~ P, at the last accepted node.

Each new token follows the first P of its node exactly. Given the siblings before it, x_j ~ the current Q. So by the
argument of `chain.py` a token follows the current P if it follows the residual distribution after a rejection. That is
the P of the next trial, and the last P is sampled.

Where Q has no mass left, the paper takes a uniform Q. Here that does not happen: logits are finite, and Q is
softmax(logits) with -inf for rejected tokens.
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
    parents: the parent of each of the N nodes; parents[0] = -1, parents[i] < i. Siblings are drafted in index order.
    """
    children = [[i for i, parent in enumerate(parents) if parent == node] for node in range(len(parents))]
    prefix = input_ids[0]
    end = len(prefix) + max_new_tokens
    while len(prefix) < end:
        first_row = ROWS_PER_STEP * (len(prefix) - 1)  # random numbers of node i are in row first_row + i

        # 1. Draft. No drafted node attends to nodes that are not drafted yet, so any token may stand for them.
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
    """The path from the root to the last accepted node, and the distribution [V] of the token after it."""
    path = [0]
    while True:
        node = path[-1]
        target_probs = torch.softmax(target_logits[node], -1)  # P, [V]
        logits = draft_logits[node].clone()
        offered = children[node] if len(path) < max_length else []
        for j, child in enumerate(offered):
            token = tokens[child]
            draft_probs = torch.softmax(logits, -1)  # Q, [V]
            if uniform(seed, first_row + node, j) < target_probs[token] / draft_probs[token]:
                path.append(child)
                break
            target_probs = residual(target_probs, draft_probs)
            logits[token] = -torch.inf
        else:
            return path, target_probs


def tree_logits(model: Any, prefix: Tensor, tokens: Tensor, parents: list[int]) -> Tensor:
    """Logits [N, V] at the nodes, by one forward pass on the prefix LongTensor[T] and the tokens LongTensor[N].

    Token 0 of the tree is the last one of the prefix, and is fed once.
    """
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
