"""Decode by a method of your own: its tree, how children are drawn, and a rule for one node that keeps the law."""

import torch

from heavypath.speculative import METHODS, Method, SpeculativeDecoder, TokenTree, load_demo_pair, top_down


def weigh_the_last(log_target, log_draft, children):
    """The law [..., V] of the token after a node: its last child x is weighed against R, which is Q without the others.

    The token is x with probability min(1, P(x) / R(x)), else it is drawn from max(P - R, 0), which may give another
    child. So Hu et al. 2025 (arXiv 2502.18779) verify children of which all but the last are the draft's likeliest
    tokens. On average over x ~ R alone it is P, whatever the other children are, so these may be draws as well.
    """
    last = (children >= 0).sum(-1, keepdim=True) - 1
    last = children.gather(-1, last.clamp(min=0)).clamp(min=0)  # its token
    rest = log_draft.scatter(-1, children.where(children >= 0, last), -torch.inf)
    rest = rest.scatter(-1, last, log_draft.gather(-1, last)).log_softmax(-1)  # log R
    taken = (log_target - rest).gather(-1, last).exp().clamp(max=1)
    left = (log_target.exp() - rest.exp()).clamp(min=0)
    left *= (1 - taken) / left.sum(-1, keepdim=True).clamp(min=1e-30)
    return left.scatter_add(-1, last, taken)


def binary(size):
    """Every node has two children, on as many levels as fit into `size` nodes."""
    levels = (size + 1).bit_length() - 2
    return TokenTree.k_ary(2, levels) if levels else TokenTree.chain(1)


if __name__ == "__main__":
    METHODS["last-child"] = Method("without_replacement", "without_replacement", binary)
    target, draft, tokenizer = load_demo_pair()
    prompt = tokenizer("def read_lines(path):", return_tensors="pt").input_ids
    for name, verifier in {"rejection": "rejection", "the last child": top_down(weigh_the_last)}.items():
        decoder = SpeculativeDecoder(target, draft, "last-child", verifier=verifier, tree_size=7)
        out = decoder.generate(prompt, 64, temperature=0.6)
        print(f"{name}: {out.stats.tokens_per_step:.2f} tokens per step\n{tokenizer.decode(out.sequences[0])}\n")
