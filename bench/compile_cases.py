"""The cases of compile_report.py: calls of the package's own launchers, which together launch every kernel it has."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from machine_code import on_gpu
from torch import Tensor

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SEED = on_gpu(torch.tensor(0))  # a seed in memory, as a CUDA graph has it, where a number could not change


def named(*words: str, **options) -> str:
    """What a case is called."""
    plain = (key if value is True or value is SEED else f"{key} {value}" for key, value in options.items())
    return " ".join([*words, *plain])


class Attention(NamedTuple):
    """A call of tree_attention, or of chain_attention. group: query heads of a key head."""

    dtype: str
    head_dim: int
    nodes: int
    group: int
    prefix: int = 4096
    masked: bool = False
    chain: bool = False
    queries: int | None = None
    padded: bool = False
    window: bool = False
    softcap: bool = False

    def __str__(self) -> str:
        defaults = self._field_defaults
        options = {name: value for name, value in self._asdict().items() if value != defaults.get(name, value)}
        return named(self.dtype, f"D{self.head_dim}", f"{self.nodes}x{self.group}", **options)


def attention(case: Attention) -> None:
    from heavypath.kernels.tree_attention import chain_attention, tree_attention

    queries, kv_heads, dtype = case.queries or case.nodes, 8, DTYPES[case.dtype]
    key, value = on_gpu(torch.empty(2, 1, kv_heads, case.prefix + case.nodes, case.head_dim, dtype=dtype))
    query = on_gpu(torch.empty(1, kv_heads * case.group, queries, case.head_dim, dtype=dtype))
    lengths = on_gpu(torch.tensor([case.prefix])) if case.padded or not case.chain else case.prefix
    options = {
        "first_row": on_gpu(torch.tensor([0])) if case.padded else None,
        "window": 1024 if case.window else None,
        "softcap": 50.0 if case.softcap else None,
        "impl": "triton",
    }
    if case.chain:
        chain_attention(query, key, value, lengths, **options)
    elif case.masked:
        mask = on_gpu(torch.ones(queries, case.nodes).bool())
        tree_attention(query, key, value, prefix_length=lengths, ancestor_mask=mask, **options)
    else:
        end = on_gpu(torch.full([case.nodes], case.nodes))
        tree_attention(query, key, value, prefix_length=lengths, subtree_end=end, **options)


def ordering(nodes: int, ranked: bool) -> None:
    from heavypath.kernels.ordering import heavy_path_order

    ranks = on_gpu(torch.zeros(nodes, dtype=torch.long)) if ranked else None
    heavy_path_order(on_gpu(torch.arange(-1, nodes - 1)), ranks, impl="triton")


def long_zeros(*shape: int) -> Tensor:
    return on_gpu(torch.zeros(shape, dtype=torch.long))


def placing(nodes: int) -> None:
    """A step's first nodes, a level, the whole tree, and equal texts."""
    from heavypath.kernels.step_kernels import StepKernels
    from heavypath.kernels.trees.levels import CommonNodes, Drawn, Scored, Trees, place

    some = long_zeros(nodes)
    every = CommonNodes(some, some, some)
    trees = Trees(
        long_zeros(4, nodes), long_zeros(4), long_zeros(4, nodes), long_zeros(4), long_zeros(4), long_zeros(4, nodes)
    )
    StepKernels("triton").first_nodes(trees.left, trees.left, trees.lengths, nodes)
    place(trees, Drawn(long_zeros(4, nodes), some, some), every, impl="triton")
    place(trees, Drawn(long_zeros(4, nodes), some, some), every, whole=True, impl="triton")
    place(trees, None, every, whole=True, impl="triton")
    logits = on_gpu(torch.empty(4, nodes, 32_000, dtype=torch.bfloat16))
    for whole in (False, True):
        drawn = Drawn(long_zeros(4, nodes), some, some, Scored(logits, logits, some))
        place(trees, drawn, every, whole=whole, impl="triton")
    StepKernels("triton").alike(trees, every)


def growing(by: str, dtype: str, width: int, vocabulary: int, **options) -> None:
    """The first level of a tree, the second, and the tree assembled of both."""
    from heavypath.kernels.sampling import TopK
    from heavypath.kernels.step_kernels import StepKernels
    from heavypath.kernels.trees.slots import Level, Policy, Roots, Slots

    lines = on_gpu(torch.zeros(2, width, dtype=torch.float64)) if options.get("confidence") else None
    policy = Policy(by, width, 0.0, not options.get("likeliest", False), 0.6, lines)
    roots = Roots(long_zeros(2), long_zeros(2), long_zeros(2), long_zeros(2))
    slots = Slots(*(on_gpu(field) for field in Slots.room_for(2, 1 + 4 * width, torch.device("cpu"))))
    level, kernels = Level(0, 1, 0, on_gpu(torch.ones(2, 1, 1).bool())), StepKernels("triton")
    for _ in range(4 if width > 64 else 2):
        logits = on_gpu(torch.empty(2, level.size, vocabulary, dtype=DTYPES[dtype]))
        keys = on_gpu(torch.empty(2, level.size, width))
        level, _ = kernels.grow(slots, level, TopK(keys.long(), keys, keys), logits, roots, policy)
        level = level._replace(mask=on_gpu(level.mask))
    kernels.assemble(slots, roots, level, 32 if width < 64 else 2048, False)


def compaction(dtype: str, head_dim: int, places: int) -> None:
    from heavypath.kernels.cache_compaction import compact_cache

    key, value = torch.empty(2, 1, 8, 64, head_dim, dtype=DTYPES[dtype])
    path, one = on_gpu(torch.zeros(1, places, dtype=torch.long)), on_gpu(torch.ones(1, dtype=torch.long))
    compact_cache([on_gpu(key)], [on_gpu(value)], path, one, one, impl="triton")


def committing(nodes: int, per_sequence: bool) -> None:
    from heavypath.kernels.commit import State, StateField, commit
    from heavypath.kernels.nodes import Nodes, Verified

    def zeros(*shape: int) -> Tensor:
        return on_gpu(torch.zeros(shape, dtype=torch.long))

    batch, shape = 4, (4, nodes) if per_sequence else (nodes,)
    state = State(zeros(len(StateField), batch), zeros(batch, 9), zeros(2), zeros(batch, 9).bool(), zeros(2, 9))
    tree = Nodes(zeros(batch, nodes), zeros(*shape), zeros(*shape))
    verified = Verified(zeros(batch, min(nodes, 9)), zeros(batch), zeros(batch))
    commit(state, tree, zeros(*shape), verified, 1, impl="triton")


def norming(dtype: str, columns: int, added: bool, centred: bool = False) -> None:
    from heavypath.kernels.layers.rms_norm import Norm, add_rms_norm

    hidden, weight = (on_gpu(torch.empty(*shape, dtype=DTYPES[dtype])) for shape in ((32, columns), (columns,)))
    add_rms_norm(hidden, hidden if added else None, Norm(weight, 1e-5), centred=centred, impl="triton")


def prefetching(dtype: str, rows: int, columns: int) -> None:
    from heavypath.kernels.layers.prefetch import prefetch_weight

    prefetch_weight(on_gpu(torch.empty(rows, columns, dtype=DTYPES[dtype])), 12_000_000, impl="triton")


def entering(dtype: str, width: int, **options) -> None:
    """An EAGLE head's entries of a level, those of the first pass, and their ends; a mask of all sequences."""
    from heavypath.kernels.layers.entries import EntryNodes, EntryNorms, end_entries, entry_inputs, node_entries
    from heavypath.kernels.layers.rms_norm import Norm

    table, outputs = (on_gpu(torch.empty(*shape, dtype=DTYPES[dtype])) for shape in ((32, width), (2, 64, width)))
    norm = Norm(on_gpu(torch.empty(width, dtype=DTYPES[dtype])), 1e-5)
    norms = EntryNorms(norm, norm, **options) if options else EntryNorms(None, None)
    few = long_zeros(2, 8)
    nodes = EntryNodes(few, few, few, few, long_zeros(2), on_gpu(torch.ones(8, 64).bool()))
    node_entries(outputs, nodes, table, norms, impl="triton")
    entry_inputs(outputs, None, outputs.flatten(0, 1), norms, impl="triton")
    hidden = on_gpu(torch.empty(16, width, dtype=DTYPES[dtype]))
    end_entries(hidden, hidden, norm if options else None, outputs, few, impl="triton", **options)


def correcting(dtype: str, hidden: int, size: int, vocabulary: int) -> None:
    """What the terms of block drafts launch: rows, units, messages, a correction's input, logits of a few tokens."""
    from heavypath.kernels.layers.entries import EntryNorms, entry_inputs
    from heavypath.kernels.layers.few_logits import few_logits
    from heavypath.kernels.layers.rms_norm import Norm
    from heavypath.kernels.layers.side_by_side import FieldRows, side_by_side
    from heavypath.kernels.layers.spread import spread_few
    from heavypath.kernels.layers.units import gru_unit, message_unit, rnn_unit

    def empty(*shape: int) -> Tensor:
        return on_gpu(torch.empty(shape, dtype=DTYPES[dtype]))

    at, row = long_zeros(1, 8), FieldRows.for_each(empty(1, hidden))
    words, states = FieldRows.of_table(empty(1000, size), at), FieldRows(empty(1, 100, size), at)
    side_by_side([row, words], impl="triton")
    joined = side_by_side([states, words, row], impl="triton")
    product = empty(1, 8, 3 * size)
    rnn_unit(product, joined[..., :size], states, impl="triton")
    gru_unit(product, product, joined[..., :size], row.looked_up(1, 8), states, impl="triton")
    norm = Norm(empty(hidden), 1e-5)
    features = row.looked_up(1, 8)
    entry_inputs(features, at, empty(1000, hidden), EntryNorms(norm, norm), features_first=True, impl="triton")
    spread_few(empty(1, 8, 16), long_zeros(1, 16), vocabulary, empty(1, 16), impl="triton")
    of_row, receiver, best, lengths = on_gpu(torch.zeros(1, hidden + size + 32)).split([hidden, size, 16, 16], -1)
    message_unit(empty(1, 8, size), empty(1, 8, size), receiver, lengths[:, :1], 16.0, impl="triton")
    few_logits(of_row, empty(1, 8, hidden), norm, empty(1000, hidden), best, impl="triton")
    spread_few(empty(1, 8, 16).float(), best, vocabulary, impl="triton")


def spreading(dtype: str, own: int, vocabulary: int) -> None:
    from heavypath.kernels.layers.spread import OwnTokens, spread_logits

    tokens = OwnTokens(long_zeros(own), on_gpu(torch.zeros(vocabulary, dtype=torch.int32)))
    spread_logits(on_gpu(torch.empty(1, 8, own, dtype=DTYPES[dtype])), tokens, impl="triton")


def gating(dtype: str, columns: int) -> None:
    from heavypath.kernels.layers.gated import silu_product

    joined = on_gpu(torch.empty(32, 2 * columns, dtype=DTYPES[dtype]))
    silu_product(joined[:, :columns], joined[:, columns:], impl="triton")


def multiplying(dtype: str, outputs: int, columns: int, rows: int, **options) -> None:
    from heavypath.kernels.layers.few_rows import few_rows_product

    in_fp8 = options.pop("fp8", False)
    if in_fp8 and torch.cuda.get_device_capability() < (8, 9):
        return  # which has no fp8
    x = on_gpu(torch.empty(rows, columns, dtype=DTYPES[dtype]))
    weight = on_gpu(torch.empty(outputs, columns, dtype=torch.float8_e4m3fn if in_fp8 else x.dtype))
    scale = on_gpu(torch.empty(outputs)) if in_fp8 else None
    few_rows_product(x, weight, scale=scale, impl="triton", **options)


def turning(dtype: str, heads: int, kv_heads: int, head_dim: int, normed: bool = False) -> None:
    from heavypath.kernels.layers.rms_norm import Norm
    from heavypath.kernels.layers.rotary import HeadNorms, Projected, Turns, rotate_and_store

    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    joined = on_gpu(torch.empty(32, sum(sizes), dtype=DTYPES[dtype]))
    table, positions = on_gpu(torch.empty(4096, 2, head_dim, dtype=DTYPES[dtype])), on_gpu(torch.zeros(1, 32).long())
    keys, values = on_gpu(torch.empty(2, 1, kv_heads, 1024, head_dim, dtype=DTYPES[dtype]))
    norm = Norm(on_gpu(torch.empty(head_dim, dtype=DTYPES[dtype])), 1e-6)
    rotate_and_store(
        Projected(*(states.view(1, 32, -1, head_dim) for states in joined.split(sizes, -1))),
        Turns.at(table, positions, impl="triton"),
        keys,
        values,
        positions,
        HeadNorms(norm, norm) if normed else None,
        impl="triton",
    )


def recurring(kind: str, dtype: str, columns: int, nodes: int, *, projected: bool = False) -> None:
    """A layer with a recurrent state over a tree, and its acceptance: 16 key heads for 32, 32 for 32, or one for 64.

    projected: whether gates and strengths are made of parts of a product
    """
    from heavypath.kernels.recurrent.acceptance import accept_state
    from heavypath.kernels.recurrent.convolution import tree_conv
    from heavypath.kernels.recurrent.delta import tree_delta
    from heavypath.kernels.recurrent.kda import tree_kda
    from heavypath.kernels.recurrent.paths import KeptNodes, Paths
    from heavypath.kernels.recurrent.ssd import tree_ssd
    from heavypath.kernels.recurrent.totals import GateWeights

    heads, key_heads = {"delta": (32, 16), "kda": (32, 32), "ssd": (64, 1)}[kind]
    paths = Paths(torch.ones(2, nodes, nodes).bool())
    channels = 2 * key_heads * 128 + heads * columns
    state = on_gpu(torch.empty(2, heads, 128, columns))
    inputs, weight = (on_gpu(torch.empty(*size, channels, dtype=DTYPES[dtype])) for size in ((2, nodes), (4,)))
    bias = None if kind == "delta" else weight[0]
    tree_conv(inputs, on_gpu(torch.empty(2, 3, channels)), weight.T, bias, paths.windows(4), impl="triton")
    parts = inputs.split([key_heads * 128, key_heads * 128, heads * columns], -1)
    query, key, value = (
        on_gpu(part.unflatten(-1, (-1, size))) for part, size in zip(parts, (128, 128, columns), strict=True)
    )
    totals = torch.empty(2, nodes, heads, *[128] * (kind == "kda"), dtype=torch.float64)
    gate, beta = on_gpu(totals.float()), on_gpu(torch.empty(2, nodes, heads, dtype=value.dtype))
    if projected:
        gate, beta = on_gpu(torch.empty(2, nodes, channels, dtype=value.dtype))[..., -2 * heads :].split(heads, -1)
        weights = GateWeights(*on_gpu(torch.empty(2, heads, dtype=value.dtype)))
        tree_delta(query, key, value, gate, beta, state, paths, weights=weights, impl="triton")
    elif kind == "ssd":
        tree_ssd(query, key, on_gpu(value.float()), gate, state, paths, impl="triton")
    else:
        (tree_kda if kind == "kda" else tree_delta)(query, key, value, gate, beta, state, paths, impl="triton")
    kept = KeptNodes(key, torch.empty(value.shape), totals)
    accept_state(state, kept, long_zeros(2, 9), long_zeros(2), normalised=kind != "ssd", impl="triton")


def sampling(dtype: str, vocabulary: int, k: int, **options) -> None:
    from heavypath.kernels.sampling import gumbel_topk

    gumbel_topk(on_gpu(torch.empty(1, vocabulary, dtype=DTYPES[dtype])), k, impl="triton", **options)


def drawing_tokens(dtype: str, vocabulary: int, k: int, uniform_fill: bool = False) -> None:
    from heavypath.kernels.filtering import Filters
    from heavypath.kernels.noise import Noise, Stream
    from heavypath.kernels.nucleus import launch_tokens

    logits, noise = on_gpu(torch.empty(8, vocabulary, dtype=DTYPES[dtype])), Noise(SEED, long_zeros(8))
    launch_tokens(logits, k, Filters(0.6, top_p=0.9), noise=noise, stream=Stream.DRAFT, uniform_fill=uniform_fill)


def scoring(dtype: str, nodes: int, vocabulary: int) -> None:
    from heavypath.kernels.sequence_scores import sequence_scores

    logits = on_gpu(torch.empty(4, nodes, vocabulary, dtype=DTYPES[dtype]))
    sequence_scores(logits, on_gpu(torch.zeros(4, 2, 4, dtype=torch.float64))[:, 0], impl="triton")


def verification(method: str, dtype: str, nodes: int, vocabulary: int, **options) -> None:
    from heavypath.kernels.verification import verify_tree

    logits = on_gpu(torch.empty(1, nodes, vocabulary, dtype=DTYPES[dtype]))
    tokens, parents = on_gpu(torch.zeros(1, nodes, dtype=torch.long)), on_gpu(torch.arange(-1, nodes - 1))
    verify_tree(tokens, parents, logits, logits, method=method, max_depth=8, impl="triton", **options)


def retrieving(longest: int) -> None:
    from heavypath.kernels.retrieval.corpus import SortedCorpus
    from heavypath.kernels.retrieval.followers import follower_logprobs
    from heavypath.kernels.retrieval.ranges import Appended, append_tokens, renew_ranges

    corpus = SortedCorpus(on_gpu(torch.zeros(99, dtype=torch.int32)), long_zeros(99))
    nodes = Appended(*(long_zeros(2, 16) for _ in Appended._fields))
    keys, values = long_zeros(2, 2, 64, longest), long_zeros(2, 2, 64, longest)
    renew_ranges(corpus, long_zeros(2), keys, values, impl="triton")
    append_tokens(corpus, nodes, keys, values, impl="triton")
    follower_logprobs(corpus, nodes.cache_rows, long_zeros(2), keys, values, vocab_size=9, impl="triton")


def looking_up(longest: int, is_chain: bool = False) -> None:
    from heavypath.kernels.retrieval.latest import latest_logprobs
    from heavypath.kernels.retrieval.ranges import Appended

    nodes = Appended(*(long_zeros(2, 16) for _ in Appended._fields))
    keys, values = long_zeros(2, 1, 64, longest), long_zeros(2, 1, 64, longest)
    options = {"shortest": 1, "is_chain": is_chain, "vocab_size": 9}
    latest_logprobs(nodes, long_zeros(2), keys, values, impl="triton", **options)


def mixing(dtype: str, vocabulary: int) -> None:
    from heavypath.kernels.mixing import add_to_mixture

    logits = on_gpu(torch.empty(1, 16, vocabulary, dtype=DTYPES[dtype]))
    mixed = add_to_mixture(None, logits, -0.1, impl="triton")
    add_to_mixture(mixed, logits, -2.3, impl="triton")


def packing(nodes: int, window: int | None) -> None:
    from heavypath.kernels.attention.masks import pack_ancestors

    pack_ancestors(on_gpu(torch.ones(4, nodes).bool()), window, impl="triton")


def cases(function: Callable[..., None], words: str, *rows: tuple) -> dict[str, Callable[[], None]]:
    """A case for each row of arguments, the last of which may be options by name. words: with the arguments' places."""
    found = {}
    for row in rows:
        *given, options = row if isinstance(row[-1], dict) else (*row, {})
        found[named(words.format(*given), **options)] = partial(function, *given, **options)
    return found


FILTERS: dict[str, Any] = {"top_k": 50, "top_p": 0.9, "min_p": 0.01}
ATTENTION = [  # every tile size, both kinds of tree
    *(Attention("bf16", 128, nodes, group) for nodes, group in ((1, 1), (1, 4), (64, 1), (64, 4), (256, 8))),
    *(Attention("bf16", head_dim, 64, 4) for head_dim in (16, 32, 40, 64, 80, 192, 256)),
    Attention("bf16", 64, 1, 4),
    Attention("bf16", 256, 1, 4),
    Attention("bf16", 64, 64, 1),
    Attention("bf16", 128, 2048, 8, prefix=0),
    Attention("bf16", 128, 2048, 8, prefix=0, masked=True),
    Attention("bf16", 128, 64, 4, masked=True, queries=16),
    Attention("bf16", 64, 256, 8, masked=True),
    Attention("bf16", 128, 1, 4, padded=True, window=True),
    Attention("bf16", 128, 64, 4, padded=True, window=True, softcap=True),
    Attention("bf16", 128, 64, 4, masked=True, queries=16, window=True),
    Attention("bf16", 256, 64, 2, masked=True, window=True, softcap=True),
    *(Attention("bf16", 128, nodes, 4, chain=True) for nodes in (1, 512)),
    Attention("bf16", 128, 1, 4, chain=True, padded=True, window=True),
    Attention("bf16", 64, 512, 4, chain=True, padded=True, window=True, softcap=True),
    Attention("fp16", 128, 64, 4),
    Attention("fp32", 128, 1, 4),
    Attention("fp32", 64, 64, 4),
    Attention("fp32", 128, 64, 4),
    Attention("fp32", 256, 64, 1, masked=True),
]
CASES = {  # Llama-2-7B and 68M, Qwen3-8B, the largest rows, what has no power of two; sizes of 1 are Triton's constants
    **cases(norming, "norm {} K{} added", ("bf16", 4096, True), ("bf16", 768, True), ("fp16", 896, True),
            ("fp32", 8192, True), ("bf16", 16384, True), ("fp32", 32768, True),
            ("bf16", 4096, True, {"centred": True})),
    **cases(norming, "norm {} K{} added False", ("bf16", 4096, False)),
    **cases(prefetching, "prefetch {} {}x{}", ("bf16", 4096, 4096)),
    **cases(entering, "entries {} H{}", ("bf16", 4096, {"keeps_normed": False}), ("bf16", 4096, {"keeps_normed": True}),
            ("fp16", 896), ("fp32", 8192, {"keeps_normed": False})),
    **cases(correcting, "terms {} H{} S{} of {}", ("bf16", 4096, 256, 128_256), ("fp32", 96, 24, 1000)),
    **cases(spreading, "spread {} {} of {}", ("bf16", 32_000, 128_256), ("fp32", 24, 1000)),
    **cases(gating, "gate {} F{}", ("bf16", 11008), ("fp16", 14336), ("fp32", 96)),
    **cases(multiplying, "product {} {}x{} {} rows", ("bf16", 12288, 4096, 64),
            ("bf16", 4096, 4096, 64), ("bf16", 22016, 4096, 64, {"gated": True}),
            ("bf16", 4096, 11008, 128), ("fp16", 32000, 4096, 16), ("bf16", 2304, 768, 32),
            ("bf16", 32000, 4096, 16, {"fp8": True}), ("fp16", 4096, 14336, 64, {"fp8": True})),
    **cases(turning, "rotary {} {}:{} D{}", ("bf16", 32, 32, 128), ("bf16", 12, 12, 64), ("fp16", 32, 8, 128),
            ("fp32", 4, 2, 24), ("fp32", 8, 8, 256), ("bf16", 32, 8, 128, {"normed": True})),
    **cases(recurring, "recurrent {} {} D{} {} nodes", ("delta", "bf16", 128, 64), ("delta", "fp32", 128, 64),
            ("delta", "fp16", 128, 256), ("kda", "bf16", 128, 64), ("kda", "fp32", 128, 64), ("ssd", "bf16", 64, 64),
            ("ssd", "fp32", 64, 64), ("delta", "bf16", 128, 64, {"projected": True}),
            ("delta", "fp32", 128, 64, {"projected": True})),
    "mask of 32": partial(packing, 32, None),
    "mask of 2048 window": partial(packing, 2048, 100),
    **cases(
        verification, "{} {} {} nodes V{}",
        *((method, "bf16", 64, 128256) for method in ("without_replacement", "with_replacement", "kseq", "race")),
        ("held", "bf16", 64, 128256),
        ("held", "bf16", 64, 128256, {"replacement": True}),
        ("held", "fp32", 2048, 32000),
        ("held", "bf16", 2, 1),
        ("held", "bf16", 64, 32000, FILTERS | {"seed": SEED}),
        ("without_replacement", "bf16", 768, 32000),
        ("without_replacement", "fp32", 2048, 32000),
        ("without_replacement", "fp16", 64, 999),
        ("without_replacement", "bf16", 2, 1),
        ("kseq", "bf16", 1, 1),
        ("without_replacement", "bf16", 64, 32000, FILTERS),
        ("with_replacement", "bf16", 64, 32000, FILTERS),
        ("without_replacement", "bf16", 64, 32000, {"draft_temperature": 0.0}),
        *((method, "bf16", 64, 128256, {"seed": SEED}) for method in ("without_replacement", "kseq", "race")),
        ("without_replacement", "bf16", 64, 32000, FILTERS | {"seed": SEED}),
        ("traversal", "bf16", 64, 128256),
        ("traversal", "bf16", 64, 128256, {"replacement": True}),
        ("held_traversal", "bf16", 64, 128256),
        ("held_traversal", "bf16", 64, 32000, {"replacement": True, "seed": SEED}),
        ("traversal", "bf16", 64, 32000, FILTERS | {"seed": SEED}),
        ("held_traversal", "bf16", 64, 32000, FILTERS | {"replacement": True}),
        ("traversal", "bf16", 64, 32000, {"draft_temperature": 0.0}),
        ("traversal", "fp32", 2048, 32000),
        ("traversal", "fp16", 2, 1),
    ),
    **cases(
        sampling, "{} V{} k{}",
        *(("bf16", 128256, k) for k in (1, 4, 32, 64)),
        ("fp16", 32000, 4),
        ("fp32", 32000, 4),
        ("bf16", 999, 4),
        ("bf16", 128256, 4, {"temperature": 0.0}),
        ("bf16", 128256, 4, {"replacement": True}),
        ("bf16", 128256, 8, FILTERS | {"uniform_fill": True}),
        *((dtype, 128256, 1, {name: value}) for dtype in ("bf16", "fp32") for name, value in FILTERS.items()),
        ("fp16", 999, 4, FILTERS),
        ("bf16", 128256, 4, {"seed": SEED}),
        ("bf16", 128256, 8, FILTERS | {"uniform_fill": True, "seed": SEED}),
    ),
    **cases(drawing_tokens, "tokens under top_p {} V{} k{}", ("bf16", 128256, 1), ("bf16", 128256, 8),
            ("bf16", 32000, 16), ("fp32", 32000, 4, {"uniform_fill": True}), ("fp16", 992, 4)),
    **cases(scoring, "scores by sequence {} {} nodes V{}", ("bf16", 64, 128256), ("fp16", 1, 32000), ("fp32", 2, 1)),
    **{str(case): partial(attention, case) for case in ATTENTION},
    **cases(retrieving, "retrieval of {}", (8,), (16,)),
    **cases(mixing, "mixture {} V{}", ("bf16", 128_256), ("fp32", 32_000)),
    **cases(looking_up, "lookup of {}", (3,), (3, {"is_chain": True}), (16,)),
    **{f"tree of {nodes}": partial(committing, nodes, per_sequence=nodes > 64) for nodes in (1, 64, 2048)},
    **cases(placing, "level of {}", (5,), (2048,)),
    **cases(
        growing, "grow by {} {} {} wide V{}",
        *(("slot", dtype, 16, 128256, {"confidence": True}) for dtype in ("bf16", "fp16", "fp32")),
        ("slot", "bf16", 16, 128256),
        ("slot", "bf16", 16, 32000, {"likeliest": True}),
        ("node", "bf16", 16, 32000, {"likeliest": True}),
        ("beam", "bf16", 6, 32000),
        ("beam", "bf16", 6, 32000, {"likeliest": True}),
        ("slot", "bf16", 1023, 32000, {"confidence": True}),
        ("beam", "bf16", 1023, 32000),
    ),
    **{f"{nodes} nodes": partial(ordering, nodes, ranked=False) for nodes in (64, 2048)},
    **{f"{nodes} nodes ranked": partial(ordering, nodes, ranked=True) for nodes in (64, 2048)},
    **cases(compaction, "{} D{} path {}", ("bf16", 128, 5), ("bf16", 128, 17), ("bf16", 128, 2048), ("bf16", 5, 2048)),
}  # fmt: skip
