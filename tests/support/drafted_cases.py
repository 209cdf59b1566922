"""What drafts say after each node of the trees that a decoder drafts, and what they should say of the whole text."""

from typing import NamedTuple

import torch
from block_checkpoints import said_of
from head_cases import entries_over, logits_with_masks
from tiny_models import tiny_llama
from torch import Tensor
from torch.utils._pytree import tree_map_only

from heavypath.kernels.commit import StateField
from heavypath.kernels.native.recording import Recording
from heavypath.speculative import BlockHead, Cascade, MedusaHeads, Merge, Mixture, Pard, PromptLookup, Translated
from heavypath.speculative.decoding import run as steps_module
from heavypath.speculative.decoding.workspace import Launcher

PROMPTS = [torch.tensor([3, 1, 4, 1, 5, 2]), torch.tensor([2, 6, 5])]


class Node(NamedTuple):
    """A distribution that children were drawn from.

    text:   LongTensor[L], of the sequence with the tree's root
    path:   the drafted tokens from below the root to the node
    logits: [V]
    first:  the rank of the root's child above the node, or of the first child if it is the root. Nodes of equal texts
            have the distribution of the first of them
    """

    text: Tensor
    path: list[int]
    logits: Tensor
    first: int


def drafted_nodes(decoder, new_tokens, prompts=PROMPTS):
    """What `generate` returns for a batch of different prompts at temperature 1, and each node that has children."""
    width, nodes = max(map(len, prompts)), []
    padded = torch.stack([torch.cat([torch.zeros(width - len(each)).long(), each]) for each in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(each) for each in prompts]).long()
    out, steps = steps_of(decoder, padded, attention_mask=mask, max_new_tokens=new_tokens, temperature=1.0)
    for before, drafted in steps:
        for slot in range(before.shape[1] if drafted.logits is not None else 0):
            member, length = (int(before[field, slot]) for field in (StateField.MEMBER, StateField.LENGTHS))
            text = torch.cat([prompts[member], out.sequences[member, width:]])[: length + 1]
            nodes += nodes_of(text, drafted, slot, most=int(before[StateField.LEFT, slot]))
    return out, nodes


def assert_drafts_as_said(decoder, draft, new_tokens, prompts=PROMPTS, atol=3e-4):
    """What passes over the whole text say, at each node, over steps that accept some. Returns the nodes."""
    out, nodes = drafted_nodes(decoder, new_tokens, prompts)
    for node in nodes:
        own = draft.drafts[node.first % len(draft.drafts)] if isinstance(draft, Merge) else draft
        said = said_by(own, decoder.target, node.text, node.path)
        torch.testing.assert_close(law_of(node.logits), said, atol=atol, rtol=1e-3)
    assert max(len(node.path) for node in nodes) > 0, "there were only roots"
    assert out.stats.tokens_per_step > 1.05, "nothing is shown of rows behind accepted nodes"
    return nodes


def nodes_of(text, drafted, slot, most):
    """Each distribution of a sequence's tree once, of those above the last level that fits."""
    parents, ranks = (each if each.dim() == 1 else each[slot] for each in (drafted.parents, drafted.ranks))
    tokens, seen, firsts = drafted.tokens[slot].tolist(), set(), {}
    several = drafted.logits.shape[1] - len(tokens)  # distributions after the root besides the first
    for node in range(1, len(tokens)):
        path, at, first = [], int(parents[node]), node
        while at > 0:
            path, at, first = [tokens[at], *path], int(parents[at]), at
        law, rank = int(parents[node]), int(ranks[first])
        if law == 0 and rank % (several + 1) > 0:
            law = len(tokens) - 1 + rank % (several + 1)
        if min([tokens[node], *path]) >= 0 and len(path) < most and law not in seen:
            seen.add(law)
            yield Node(text, path, drafted.logits[slot, law], firsts.setdefault(tuple(path), rank) if path else rank)


def steps_of(decoder, *arguments, **options):
    """What `generate` returns, and for each step the numbers of `StateField` before it, and what it drafted."""
    steps, run = [], decoder.runner.run

    def noting(plan, workspace, *, slots, **more):
        before = workspace.state.numbers[:, :slots].clone()
        stepped = run(plan, workspace, slots=slots, **more)
        steps.append((before, tree_map_only(Tensor, torch.clone, stepped.drafted)))  # a replay writes it anew
        return stepped

    decoder.runner.run = noting
    try:
        return decoder.generate(*arguments, **options), steps
    finally:
        decoder.runner.run = run


def drafted(decoder, prompts, **options):
    """Of each prompt the text, and for each step the drafted tokens and the logits that they were drawn from."""
    texts, found = [], []
    for prompt in prompts:
        out, steps = steps_of(decoder, prompt[None], **options)
        texts.append(out.sequences)
        for _, each in steps:
            if each.logits is not None:  # which are undefined after leaves
                parents = each.parents.expand(len(each.tokens), -1)[:, 1:, None]
                drawn_from = each.logits.gather(1, parents.expand(-1, -1, each.logits.shape[2]))
                found.append((each.tokens, drawn_from.where(each.tokens[:, 1:, None] >= 0, 0)))
    return texts, found


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        for each, another in zip(one, other, strict=True):
            pair = ([one] if isinstance(one, Tensor) else one for one in (each, another))
            assert all(map(torch.equal, *pair))


def assert_replays_as_run(decoder, prompts, monkeypatch, **options):
    """Recorded steps draft and write what others do. Returns whether each replay came to its end."""
    replays, replay = [], Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda self: (replays.append(replay(self)), replays[-1])[1])
    found = drafted(decoder, prompts, **options)
    monkeypatch.setattr(steps_module, "Recordings", Launcher)
    count = len(replays)
    assert_equal(found, drafted(decoder, prompts, **options))
    assert len(replays) == count
    return replays


def assert_later_turns_agree(decoder, *, unread=12):
    """With and without what is cached of the turn before; all but `unread` tokens of it are taken from there."""
    first = decoder.generate(torch.tensor([[3, 1, 4, 1, 5, 2, 2]]), max_new_tokens=30, temperature=1.0)
    cache = first.cache
    for kept in (36, 20, 3):
        prompt = torch.cat([first.sequences[:, :kept], (first.sequences[:, kept : kept + 1] + 1) % 7], 1)
        fresh, fresh_steps = steps_of(decoder, prompt, max_new_tokens=12, temperature=1.0)
        again, again_steps = steps_of(decoder, prompt, max_new_tokens=12, temperature=1.0, past=cache)
        assert again.stats.reused_tokens >= kept - unread
        assert torch.equal(fresh.sequences, again.sequences)
        for (_, one), (_, other) in zip(fresh_steps, again_steps, strict=True):
            if one.logits is not None:
                torch.testing.assert_close(one.logits[:, 0], other.logits[:, 0])


@torch.no_grad()
def said_by(draft, target, text, path):
    """Probabilities [V] after a text and a path of drafted tokens, by a pass over all of it; zeros for no proposal."""
    whole = torch.cat([text, torch.tensor(path, dtype=torch.long)])
    if isinstance(draft, Cascade):
        ends = torch.tensor(draft.levels).cumsum(0)[:-1]
        return said_by(draft.drafts[int((ends <= len(path)).sum())], target, text, path)
    if isinstance(draft, Mixture):  # the weighted mean of its parts, or of those that propose anything
        parts = torch.stack([said_by(part, target, text, path) for part in draft.drafts], 1)
        return normalised(parts @ torch.tensor(draft.weights or [0.9, 0.05, 0.05]))
    if isinstance(draft, PromptLookup):
        return normalised(torch.tensor(followed(text.tolist(), whole.tolist(), draft, 7)))
    if isinstance(draft, MedusaHeads):  # all of them speak of the feature before the root
        states = target(text[None], output_hidden_states=True).hidden_states[-1][0]
        before = states[-2:-1] if len(text) > 1 else torch.zeros_like(states)
        logits = draft(before, target.lm_head)[0]
        return logits[len(path)].softmax(-1).float() if len(path) < len(logits) else torch.zeros(7)
    if isinstance(draft, Pard):  # masks stand for the path
        if len(path) >= draft.depths:
            return torch.zeros(7)
        masks = torch.full((len(path),), draft.mask_token_id)
        return draft.model(torch.cat([text, masks])[None]).logits[0, -1].softmax(-1).float()
    if isinstance(draft, Translated):
        return said_in_letters(draft, whole)
    if isinstance(draft, BlockHead):
        return law_of(said_of(draft, target, text).after(path).float())
    if hasattr(draft, "generate"):
        return draft(whole[None]).logits[0, -1].softmax(-1).float()
    if getattr(draft, "mask_hidden", None) is not None:
        return law_of(logits_with_masks(draft, target, text, len(path))).float()
    return entries_over(draft, target, text, path)[-1].softmax(-1).float()


def said_in_letters(draft, text):
    """Of a draft with another tokenizer, both of letters: tokens that it lacks are spelt, with room for two each."""
    names = {token: word for word, token in draft.target_tokenizer.get_vocab().items()}
    own, read = draft.tokenizer.get_vocab(), []
    for count, token in enumerate(text.tolist(), 1):
        word = names[token]
        pieces = [own[word]] if word in own else [own[each] for each in word if each in own] or [own["<end>"]]
        read += pieces[-(2 * count - len(read)) :]
    logits = draft.model(torch.tensor([read])).logits[0, -1]
    common = [logits[own[names[token]]] if names[token] in own else torch.tensor(-torch.inf) for token in range(7)]
    return torch.stack(common).softmax(-1).float()


def law_of(logits):
    """Probabilities; zeros of logits that propose nothing."""
    return normalised((logits - logits.max().clamp(min=-1e30)).exp())


def normalised(probs):
    return probs / probs.sum().clamp(min=1e-30)


def followed(text, context, options, vocab):
    """Probabilities of what followed the longest suffix of `context` that occurred in `text`, the latest most."""
    for length in range(options.max_ngram, options.min_ngram - 1, -1):
        suffix = context[-length:]
        places = [i + length for i in range(len(text) - length) if text[i : i + length] == suffix]
        if len(suffix) == length and places:
            probs = [0.0] * vocab
            for age, place in enumerate(reversed(places), start=1):
                probs[text[place]] += 0.5**age
            return probs
    return [0.0] * vocab


def small_draft(seed=5):
    """A model of one layer, in fp64."""
    settings = {"hidden_size": 16, "num_attention_heads": 2, "layers": 1, "max_position_embeddings": 256}
    return tiny_llama(seed, **settings).double()
