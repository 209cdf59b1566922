"""Growing trees on a CPU: calls of the compiled kernels in growth.cpp."""

import torch
from torch import Tensor

from heavypath.kernels.native.library import thread_count
from heavypath.kernels.native.recording import Arguments, ask, fields, launch
from heavypath.kernels.sampling import TopK
from heavypath.kernels.trees.assembly import Assembled
from heavypath.kernels.trees.levels import NodeInputs
from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots

_BY = {"slot": 0, "node": 1, "beam": 2}
_ASSEMBLED = 12  # tensors in an `Assembled` and its `NodeInputs`


class _Grow(Arguments):
    _fields_ = fields(
        "batch first parents most count slots depth by noisy threads .temperature .threshold *drawn *drawn_keys "
        "*drawn_logprobs *logits batch_stride row_stride vocab *lines line_step *roots *lengths *noise_rows *left "
        "*slot_parents *ranks *depths *tokens *values *worths *keys *above above_batch above_row *mask *fed"
    )


class _Assembly(Arguments):
    _fields_ = fields(
        "batch slots drafted inner trims most nodes *parents *ranks *depths *tokens *values *lengths *noise_rows *out"
    )


def grow(
    slots: Slots, above: Level, draws: TopK, logits: Tensor, roots: Roots, policy: Policy
) -> tuple[Level, NodeInputs]:
    """Fill the next level, as `trees.growing.grow` does."""
    slots.check_contiguous()
    batch, parents, most = draws.tokens.shape
    count = policy.slots_below(draws)
    end = above.first + parents
    assert end + count <= slots.tokens.shape[1]
    lines = None if policy.by == "beam" or policy.lines is None else policy.lines.contiguous()
    mask = torch.empty(batch, count, end + count, dtype=torch.bool, device="cpu")
    inputs = torch.empty(5, batch, count, dtype=torch.long, device="cpu")
    mask_above = above.mask if above.mask.stride(2) == 1 else above.mask.contiguous()
    rows = {}
    if lines is not None or (policy.by != "beam" and not policy.noisy):
        logits = logits.detach().float()
        logits = logits if logits.stride(2) == 1 else logits.contiguous()
        strides = {"batch_stride": logits.stride(0), "row_stride": logits.stride(1)}
        rows = {"logits": logits, **strides, "vocab": logits.shape[2]}
    drawn, drawn_keys, drawn_logprobs = (each.contiguous() for each in draws)
    root_tokens, lengths, noise_rows, left = (each.contiguous() for each in roots)
    call = _Grow(
        batch,
        above.first,
        parents,
        most,
        count,
        slots.tokens.shape[1],
        above.depth + 1,
        _BY[policy.by],
        policy.noisy,
        thread_count(),
        policy.temperature,
        policy.threshold,
        drawn,
        drawn_keys,
        drawn_logprobs,
        lines=lines,
        line_step=0 if lines is None else lines.shape[1],
        roots=root_tokens,
        lengths=lengths,
        noise_rows=noise_rows,
        left=left,
        slot_parents=slots.parents,
        **{name: getattr(slots, name) for name in Slots._fields[1:]},
        above=mask_above,
        above_batch=mask_above.stride(0),
        above_row=mask_above.stride(1),
        mask=mask,
        fed=inputs,
        **rows,
    )
    launch("grow", call)
    return Level(end, count, above.depth + 1, mask), NodeInputs(*inputs.unbind())


def assemble(slots: Slots, roots: Roots, last: Level, nodes: int, trims: bool) -> Assembled:
    """Make trees of at most `nodes` nodes from the drafted slots, as `trees.assembly.assemble` does."""
    slots.check_contiguous()
    batch, stride = slots.tokens.shape
    nodes = min(nodes, last.end)
    out = torch.empty(_ASSEMBLED * batch * nodes, dtype=torch.long, device="cpu")
    call = _Assembly(
        batch,
        stride,
        last.end,
        last.first,
        trims,
        nodes,
        0,
        slots.parents,
        slots.ranks,
        slots.depths,
        slots.tokens,
        slots.values,
        roots.lengths.contiguous(),
        roots.noise_rows.contiguous(),
        out,
    )
    launch("assemble", call)
    if trims:
        out = out[: _ASSEMBLED * batch * ask(lambda: call.nodes)]  # absent nodes come last
    fields = out.view(_ASSEMBLED, batch, -1).unbind()
    return Assembled(*fields[:7], inputs=NodeInputs(*fields[7:]))
