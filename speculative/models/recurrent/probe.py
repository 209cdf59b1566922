"""Try a forward pass of a model with recurrent layers on small trees, like `models.probe`, but token by token.

Nemotron-H and Zamba2 compute prompts and single tokens differently: they clamp the time steps of a prompt from below,
and not those of single tokens. The reference is what `generate` does. So each path is run with the model's own cache:
first the prompt, up to the root, and then one token after the other. In 16 bits single tokens have larger rounding
errors than a pass over several, and may choose other experts, so there the logits may agree with either of the two. An
accepted path, out of order, is followed by a second tree.
"""

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from heavypath.speculative.models.forward import TreeMask
from heavypath.speculative.models.generic import TransformersForward
from heavypath.speculative.models.probe import check_own_logits
from heavypath.speculative.models.recurrent.cache import HybridCache

ENDS = [8, 6, 6, 6, 6, 6, 8, 8]
DEPTHS = [0, 1, 2, 3, 4, 5, 1, 2]
PATHS = [0, 1, 2, 3, 4, 5], [0, 6, 7]  # a chain of six nodes, and two nodes below its root


@torch.no_grad()
def gap(forward: TransformersForward, model: nn.Module, cache: HybridCache) -> float:
    """The largest distance of two small trees' logits from those of their paths, in standard deviations of the latter.

    model: the model that the forward pass replaces; cache: for at least two sequences and 32 rows
    """
    device = forward.device
    noise = torch.Generator().manual_seed(0)  # torch's own generator is the caller's
    tokens = torch.randint(forward.vocab_size, (2, 25), generator=noise, device="cpu").to(device)
    prefix, first, second = tokens.split([9, 8, 8], 1)
    lengths = torch.tensor([9, 2], device=device)  # longer and shorter than a convolution's kernel
    cache.begin(lengths)
    forward.prefill(prefix, cache)
    trees = [_logits(forward, first, lengths, cache)]
    path = torch.tensor([PATHS[1], [0, 1, 2]], device=device)
    count = torch.tensor([3, 1], device=device)
    cache.accept(path, count - 1, lengths)
    cache.advance(path, count)
    trees.append(_logits(forward, second, lengths + count, cache))
    distances = []
    for text, prompt in enumerate(lengths.tolist()):
        before = prefix[text, :prompt]
        accepted = torch.cat([before, first[text, path[text, : int(count[text])]]])
        for start, nodes, logits, paths in ((before, first, trees[0], PATHS), (accepted, second, trees[1], PATHS[1:])):
            longest = max(map(len, paths))
            along = torch.tensor([[*each, *each[-1:] * (longest - len(each))] for each in paths], device=device)
            texts = torch.cat([start.expand(len(paths), -1), nodes[text, along]], 1)
            ways = [_after(forward, model, texts, prompt + 1)]  # the prompt includes the root
            if forward.dtype.itemsize < 4:
                ways.append(model(texts, use_cache=False).logits)
            for way in ways:
                check_own_logits(forward, way)
            found = logits[text, along].float()
            gaps = torch.stack([_distance(found, way[:, -longest:].float()) for way in ways]).amin(0)
            distances += [own[: len(each)] for own, each in zip(gaps, paths, strict=True)]
    return float(torch.cat(distances).max())


def _distance(found: Tensor, expected: Tensor) -> Tensor:
    """The distance of logits [.., V] from the expected ones, in standard deviations of the latter."""
    return (found - expected).square().mean(-1).sqrt() / expected.std(-1)


def _logits(forward: TransformersForward, nodes: Tensor, lengths: Tensor, cache: HybridCache) -> Tensor:
    """Logits [2, 8, V] of `forward` after the tree of DEPTHS and ENDS with these nodes.

    nodes: LongTensor[2, 8], tokens; lengths: LongTensor[2], tokens before the roots. ValueError for another shape.
    """
    depths, ends = (torch.tensor(each, device=nodes.device) for each in (DEPTHS, ENDS))
    rows = lengths[:, None] + torch.arange(8, device=nodes.device)
    mask = TreeMask(prefix_length=lengths, visible_rows=int(lengths.max()) + 8, subtree_end=ends)
    logits = forward(nodes, lengths[:, None] + depths, rows, cache, mask)
    if logits.shape != (2, 8, forward.vocab_size):
        raise ValueError(f"expected logits {[2, 8, forward.vocab_size]} from its vocabulary, got {[*logits.shape]}")
    return logits


def _after(forward: TransformersForward, model: nn.Module, texts: Tensor, prompt: int) -> Tensor:
    """The model's own logits [B, n, V] after each token from the prompt's last on, computed as `generate` does.

    texts: LongTensor[B, T], sequences; prompt: how many of the first tokens are read in one pass
    """
    batch, width = texts.shape
    own = DynamicCache(config=forward.config)
    found = []
    place = torch.arange(width, device=texts.device).expand(batch, -1)
    for begin, end in [(0, prompt), *((at, at + 1) for at in range(prompt, width))]:
        call = {"input_ids": texts[:, begin:end], "position_ids": place[:, begin:end], "use_cache": True}
        found.append(model(**forward.taken(call | {forward.cache_argument: own})).logits[:, -1])
    return torch.stack(found, 1)
