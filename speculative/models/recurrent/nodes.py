"""How recurrent layers process the tokens of a pass: as nodes of a tree, or as a chunk of a sequence that is prefilled.

Nodes leave the state unchanged. Their intermediate results (`KeptNodes`, and the inputs of convolutions) are kept until
some of the nodes are accepted. Tokens of a prefill move the state at once, in chains of `CHUNK`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.activations import ACT2FN

from heavypath.kernels.attention.masks import interval_mask
from heavypath.kernels.recurrent.acceptance import accept_state
from heavypath.kernels.recurrent.convolution import accept_conv, tree_conv
from heavypath.kernels.recurrent.kda import tree_kda
from heavypath.kernels.recurrent.paths import KeptNodes, Paths
from heavypath.kernels.recurrent.ssd import tree_ssd
from heavypath.speculative.models.forward import TreeMask

CHUNK = 64  # tokens of one chain in prefill
PAIRS = 16  # the same with KDA, which works on pairs of tokens

Key = tuple[int, int]  # the layer, and which of its states


class States:
    """The recurrent states of B sequences.

    recurrent: fp32 [B, H, Dk, Dv] for each layer that has one; convolved: [B, K - 1, C], oldest first
    position:  LongTensor[B], how many tokens of each sequence the states include
    """

    def __init__(self, recurrent: dict[Key, Tensor], convolved: dict[Key, Tensor], position: Tensor):
        self.recurrent = recurrent
        self.convolved = convolved
        self.position = position

    def first(self, slots: int) -> "States":
        """A view of the first `slots` sequences."""
        return self.of(slice(slots))

    def of(self, slots: slice) -> "States":
        """A view of the states of the sequences in these slots."""
        recurrent = {key: one[slots] for key, one in self.recurrent.items()}
        convolved = {key: one[slots] for key, one in self.convolved.items()}
        return States(recurrent, convolved, self.position[slots])

    def tensors(self) -> list[Tensor]:
        """Views of all tensors, whose entry b is of sequence b: [B] or [B, any, any]."""
        return [self.position, *(one.flatten(2) for one in self.recurrent.values()), *self.convolved.values()]

    def copied(self) -> "States":
        """A copy with its own memory."""
        recurrent = {key: one.clone() for key, one in self.recurrent.items()}
        return States(recurrent, {key: one.clone() for key, one in self.convolved.items()}, self.position.clone())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(one.nbytes for one in self.tensors())


class TreeNodes:
    """The nodes of a tree in one step of the target, which runs them all in one pass.

    begins: bool [B], whether the tree's root is the last token of a prompt
    """

    _of_text = 1  # how many nodes of a tree's first pass belong to the sequence so far

    def __init__(self, states: States, begins: Tensor):
        self._states = states
        self._begins = begins
        self._passes: list[Paths] = []
        self._kept: dict[Key, tuple[Any, KeptNodes]] = {}
        self._inputs: dict[Key, Tensor] = {}

    def give(self, mask: TreeMask, cache_rows: Tensor) -> None:
        """Begin a pass over Q nodes of each sequence.

        mask: which of the tree's nodes each of them sees; cache_rows: LongTensor[B, Q], their rows in the cache
        """
        ancestors = mask.ancestor_mask
        if ancestors is None:
            assert mask.subtree_end is not None
            ancestors = interval_mask(mask.subtree_end)
        assert isinstance(ancestors, Tensor)
        self._passes.append(Paths(ancestors.expand(len(cache_rows), -1, -1)))

    def convolved(self, key: Key, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution [B, Q, C] of inputs [B, Q, C] along each node's path. key: layer and number of its state."""
        before = self._inputs.get(key)
        every = self._inputs[key] = inputs if before is None else torch.cat([before, inputs], 1)
        window = self._passes[-1].windows(weight.shape[-1])
        return tree_conv(every, self._states.convolved[key], weight, bias, window)

    def recur(self, key: Key, rule: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """The outputs [B, Q, H, Dv] of a rule along each node's path. key, rule, inputs: as in `Layer` and `States`."""
        above = self._kept[key][1] if key in self._kept else None
        out, kept = rule(*(each for each in inputs), self._states.recurrent[key], self._passes[-1], above)
        self._kept[key] = rule, kept
        return out

    def prompted(self) -> Tensor | None:
        """bool [B, Q, 1], which nodes of the pass are tokens of a prompt; None if no node is."""
        paths = self._passes[-1]
        if paths.before:
            return None
        return (self._begins[:, None] & (torch.arange(paths.new, device=paths.mask.device) < self._of_text))[..., None]

    def columns(self, path: Tensor) -> Tensor:
        """The columns, LongTensor[B, P], of a path's tokens among all nodes so far.

        path: LongTensor[B, P], rows after the prefix: the root's, the accepted nodes', then anything
        """
        return path.clamp(min=0)

    def accept(self, path: Tensor, count: Tensor) -> None:
        """Move the states over accepted tokens.

        path: as in `columns`; count: LongTensor[B], how many of the path's first tokens are accepted
        """
        columns = self.columns(path)
        for key, (rule, kept) in self._kept.items():
            normalised = rule is not tree_ssd
            accept_state(self._states.recurrent[key], kept, columns, count, normalised=normalised)
        last = columns.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0].where(count > 0, -1)
        for key, inputs in self._inputs.items():
            state = self._states.convolved[key]
            window = torch.cat([each.windows(state.shape[1] + 1) for each in self._passes], 1)
            accept_conv(inputs, state, window, last)
        self._states.position.add_(count)


class DraftNodes(TreeNodes):
    """The nodes of a tree in one step of a draft: level by level, preceded by the token before the root.

    A draft's state lags by that token. So each step reads the token again, and the layers see it as the root of the
    tree. A sequence of one token has no such token; the first column is meaningless then.
    """

    _of_text = 2

    def __init__(self, states: States, begins: Tensor, prefix_length: Tensor):
        super().__init__(states, begins)
        self._follows = prefix_length > 0
        self._slots = prefix_length.new_zeros(len(prefix_length), 0)  # of each column
        self._size = 0  # slots that there may be

    def give(self, mask: TreeMask, cache_rows: Tensor) -> None:
        """Begin a pass over the next level's nodes; arguments as in `TreeNodes.give`. mask: with an ancestor_mask."""
        assert isinstance(mask.ancestor_mask, Tensor)
        is_first = self._slots.shape[1] == 0
        batch = len(cache_rows)
        ancestors = mask.ancestor_mask.expand(batch, -1, -1)
        slots = (cache_rows - mask.prefix_length[:, None]).clamp(min=0)
        self._slots = torch.cat([self._slots, slots], 1)
        seen = ancestors.gather(2, self._slots[:, None].expand(-1, ancestors.shape[1], -1))
        seen[:, :, 0] = self._follows[:, None]
        if is_first:
            seen[:, 0] = torch.arange(seen.shape[2], device=seen.device) == 0
        self._size = ancestors.shape[2]
        self._passes.append(Paths(seen))

    def columns(self, path: Tensor) -> Tensor:
        """The columns, LongTensor[B, P + 1], of a path's tokens, with the token before the root first."""
        column = torch.arange(1, self._slots.shape[1], device=path.device).expand(len(path), -1)
        # An accepted leaf was not run, so it has no column. Any will do: the state lags by that token.
        of_slot = path.new_zeros(len(path), self._size + 1).scatter(1, self._slots[:, 1:], column)
        columns = pad(of_slot.gather(1, path.clamp(0, self._size)), (1, 1))
        place = torch.arange(path.shape[1] + 1, device=path.device) + (~self._follows).long()[:, None]
        return columns.gather(1, place)


class TextTokens:
    """A chunk of each sequence in prefill: tokens from the state's position on move the state at once.

    Tokens before that position have been read already. Tokens from `end` LongTensor[B] on are padding, or are read
    later. No other token sees either of them.
    """

    def __init__(self, states: States, positions: Tensor, end: Tensor):
        self._states = states
        self._width = positions.shape[1]
        begin = positions[:, 0]
        self._first = (states.position - begin).clamp(0, self._width)
        self._stop = (end - begin).clamp(0, self._width).maximum(self._first)
        self._chains: dict[int, list[tuple[int, Paths, Tensor, Tensor]]] = {}

    def convolved(self, key: Key, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution [B, N, C] of inputs [B, N, C], of which the new tokens move its state."""
        taps = weight.shape[-1]
        state = self._states.convolved[key]
        device = inputs.device
        place = torch.arange(self._width, device=device)[:, None] - torch.arange(taps - 1, -1, -1, device=device)
        first = self._first[:, None, None]
        window = (place + taps - 1).where(place >= first, (place + taps - 1 - first).clamp(min=0))
        out = tree_conv(inputs, state, weight, bias, window)
        accept_conv(inputs, state, window, (self._stop - 1).where(self._stop > self._first, -1))
        return out

    def recur(self, key: Key, rule: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """The outputs [B, N, H, Dv] of a rule for the chunk's tokens, of which the new ones move its state.

        key: layer and number of its state; rule: the recurrence, such as `tree_delta`; inputs: as in `Layer.recur`
        """
        state = self._states.recurrent[key]
        size = PAIRS if rule is tree_kda else CHUNK
        outs = []
        for begin, paths, path, count in self._chains_of(size):
            out, kept = rule(*(each[:, begin : begin + size] for each in inputs), state, paths)
            accept_state(state, kept, path, count, normalised=rule is not tree_ssd)
            outs.append(out)
        return torch.cat(outs, 1)

    def _chains_of(self, size: int) -> list[tuple[int, Paths, Tensor, Tensor]]:
        """The chunk cut into chains of `size` tokens.

        Each has the column at which it begins, its `Paths`, the columns LongTensor[B, size] in it of the tokens that
        move the state, first ones first, and their number LongTensor[B].
        """
        if size not in self._chains:
            self._chains[size] = []
            for begin in range(0, self._width, size):
                place = torch.arange(min(size, self._width - begin), device=self._first.device)
                first, stop = ((at - begin).clamp(0, len(place)) for at in (self._first, self._stop))
                mask = (place <= place[:, None]) & (place >= first[:, None, None]) | (place == place[:, None])
                path = (place + first[:, None]).clamp(max=len(place) - 1)
                self._chains[size].append((begin, Paths(mask), path, stop - first))
        return self._chains[size]

    def prompted(self) -> Tensor:
        """bool [B, 1, 1], all true: every token belongs to a prompt."""
        return torch.ones_like(self._first, dtype=torch.bool)[:, None, None]

    def end(self) -> None:
        """Advance the position, once all layers have read the chunk."""
        self._states.position.add_(self._stop - self._first)


class LayerNodes:
    """One layer of a pass, which its mixer gets in place of a state: the `Layer` of decoding and of prefill."""

    def __init__(self, nodes: TreeNodes | TextTokens, states: States, key: Key, limits: tuple[float, float] | None):
        """key: the layer and the state's number in it; limits: least and most of a prompt's time steps, or None."""
        self._nodes = nodes
        self._states = states
        self._key = key
        self._limits = limits

    @property
    def state(self) -> Tensor:
        """The layer's recurrent state, fp32 [B, H, Dk, Dv], without the nodes of this pass."""
        return self._states.recurrent[self._key]

    def convolved(self, inputs: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
        """The convolution [B, C, N] of the nodes' inputs, with the activation applied."""
        out = self._nodes.convolved(self._key, inputs.transpose(1, 2), weight, bias)
        return (out if activation is None else ACT2FN[activation](out)).to(inputs.dtype).transpose(1, 2)

    def clamped(self, steps: Tensor, limits: tuple[float, float] | None) -> Tensor:
        """Time steps [B, N, H]; those of prompt tokens are clamped.

        `limits` is ignored: transformers passes it only for several tokens at once, so the limits read from the model
        are used.
        """
        prompted = None if self._limits is None else self._nodes.prompted()
        return steps if prompted is None else steps.clamp(*(each for each in self._limits or ())).where(prompted, steps)

    def recur(self, rule: Any, inputs: tuple[Tensor, ...]) -> Tensor:
        """The outputs [B, N, H, Dv] of a rule for the tokens of the pass."""
        return self._nodes.recur(self._key, rule, inputs)
