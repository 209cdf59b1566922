"""Layers with a recurrent state over trees: against the recurrence itself, token by token along each path."""

from pathlib import Path

import pytest
import torch
from devices import DEVICE, moved, run_on
from kernel_cases import needs_compiler
from recurrent_families import path_of, random_parents
from torch import Tensor

from heavypath.kernels.recurrent.acceptance import accept_state
from heavypath.kernels.recurrent.convolution import accept_conv, tree_conv
from heavypath.kernels.recurrent.delta import tree_delta
from heavypath.kernels.recurrent.kda import tree_kda
from heavypath.kernels.recurrent.paths import KeptNodes, Paths
from heavypath.kernels.recurrent.ssd import tree_ssd
from heavypath.kernels.recurrent.totals import GateWeights, path_totals, totals_of_projected

RULES = {"delta": tree_delta, "kda": tree_kda, "ssd": tree_ssd}


def mask_of(parents: list[int]) -> Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        mask[node, path_of(parents, node)] = True
    return mask


def draw(kind: str, batch: int, nodes: int, strength: float, *, heads: int = 2, key_heads: int = 1):
    """Inputs of a rule in fp64, half of whose gates are 0, and a state."""
    key_heads, columns, values = (heads if kind == "kda" else key_heads), 16, 8
    query, key = torch.randn(2, batch, nodes, key_heads, columns, dtype=torch.float64)
    value = torch.randn(batch, nodes, heads, values, dtype=torch.float64)
    gate = -strength * torch.rand(batch, nodes, heads, *[columns] * (kind == "kda"), dtype=torch.float64)
    gate = gate * (torch.rand_like(gate) < 0.5)
    beta = 1.9 * torch.rand(batch, nodes, heads, dtype=torch.float64)
    inputs = (query, key, value, gate) if kind == "ssd" else (query, key, value, gate, beta)
    return inputs, torch.randn(batch, heads, columns, values, dtype=torch.float64)


def most_memory() -> int:
    """The bytes that this process held at once since this was asked last, on Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def recurrence(kind: str, inputs, state: Tensor, path: list[int], text: int):
    """The output after the last token of a path, and the state there: one token after the other, head by head."""
    query, key, value, gate, *rest = (each[text] for each in inputs)
    heads, outs, states = value.shape[1], [], []
    for head in range(heads):
        own, group = state[text, head].clone(), head // (heads // key.shape[1])
        out = torch.zeros(value.shape[2], dtype=own.dtype)
        for token in path:
            q, k, v = query[token, group], key[token, group], value[token, head]
            if kind != "ssd":
                q, k = (x / (x.square().sum() + 1e-6).sqrt() for x in (q, k))
                q = q / len(q) ** 0.5
            decay = gate[token, head].exp()
            own = own * (decay[:, None] if decay.dim() else decay)
            new = v if kind == "ssd" else rest[0][token, head] * (v - own.T @ k)
            own = own + torch.outer(k, new)
            out = own.T @ q
        outs.append(out)
        states.append(own)
    return torch.stack(outs), torch.stack(states)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the most memory held")
@needs_compiler
@pytest.mark.parametrize("kind", RULES)
def test_no_node_has_a_state_of_its_own(kind):
    """A pass over 400 nodes holds less than a quarter of their states."""
    torch.manual_seed(0)
    nodes, heads, columns = 400, 4, 128
    query, key, value = torch.randn(3, 1, nodes, heads, columns)
    gate = -torch.rand(1, nodes, heads, *[columns] * (kind == "kda"))
    inputs = (query, key, value, gate, torch.rand(1, nodes, heads))[: 4 if kind == "ssd" else 5]
    state, paths = torch.randn(1, heads, columns, columns), Paths(mask_of(random_parents(nodes, 0.5))[None])
    RULES[kind](*(each[:, :2] for each in inputs), state, Paths(paths.mask[:, :2, :2]))
    most_memory()
    before = most_memory()
    RULES[kind](*inputs, state, paths)
    assert most_memory() - before < nodes * state.nbytes / 4


@pytest.mark.parametrize("passes", [1, 4])
@pytest.mark.parametrize("strength", [0.1, 5.0, 100.0])
@pytest.mark.parametrize("kind", RULES)
def test_a_pass_gives_what_the_recurrence_gives_along_each_path(kind, strength, passes):
    """Outputs, and states behind accepted paths; a tree in one pass, or level by level in an order of its own."""
    torch.manual_seed(0)
    for nodes, climb in ((1, 0.5), (17, 0.0), (40, 0.35), (40, 0.7)):
        parents = [random_parents(nodes, climb) for _ in range(2)]
        inputs, state = draw(kind, 2, nodes, strength)
        depths = torch.tensor([[len(path_of(each, node)) for node in range(nodes)] for each in parents])
        order = depths.argsort(dim=1, stable=True) if passes > 1 else torch.arange(nodes).expand(2, -1)
        mask = torch.stack([mask_of(each)[own][:, own] for each, own in zip(parents, order, strict=True)])
        column, text = order.argsort(1), torch.arange(2)[:, None]
        for dtype, impl, bar in (
            (torch.float64, "torch", 1e-11), (torch.float32, "torch", 2e-5), (torch.float32, "auto", 2e-5),
        ):  # fmt: skip
            kept, outs, size = None, [], -(-nodes // passes)
            for begin in range(0, nodes, size):
                given = order[:, begin : begin + size]
                of_pass = (each[text, given].to(dtype) for each in inputs)
                seen = mask[:, begin : begin + size, : begin + size]
                out, kept = RULES[kind](*(each for each in of_pass), state.to(dtype), Paths(seen), kept, impl=impl)
                outs.append(out)
            out = torch.cat(outs, 1)
            for last in {0, nodes // 2, nodes - 1}:
                paths = path_of(parents[0], last), path_of(parents[1], last)
                expected = [recurrence(kind, inputs, state, path, text) for text, path in enumerate(paths)]
                assert off(torch.stack([out[text, column[text, last]] for text in range(2)]),
                           torch.stack([each[0] for each in expected])) < bar  # fmt: skip
                accepted = torch.zeros(2, nodes, dtype=torch.long)
                accepted[0, : len(paths[0])] = column[0, paths[0]]
                moved = state.to(dtype, copy=True)
                accept_state(moved, kept, accepted, torch.tensor([len(paths[0]), 0]), normalised=kind != "ssd")
                assert off(moved[0], expected[0][1]) < bar
                assert torch.equal(moved[1], state.to(dtype)[1])  # of whose path nothing was accepted


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("kind", RULES)
def test_strong_gates_above_weak_ones_cost_no_digits(kind, impl):
    """A sum of gates in fp32 is off by 2e-3 of itself at 3,000: what weak gates below decide would be lost."""
    torch.manual_seed(1)
    inputs, state = draw(kind, 1, 48, 150.0)
    query, key, value, gate, *rest = inputs
    gate = gate.clone()
    gate[:, :24], gate[:, 24:] = -100 - gate[:, :24].abs(), gate[:, 24:] * 1e-3
    inputs = (query, key, value, gate, *rest)
    paths = Paths(torch.ones(1, 48, 48, dtype=torch.bool).tril())
    out, kept = RULES[kind](*(each.float() for each in inputs), state.float(), paths, impl=impl)
    expected, moved = recurrence(
        kind, [each.float().double() for each in inputs], state.float().double(), [*range(48)], 0
    )
    assert off(out[0, -1], expected) < 2e-6
    own = state.float()
    accept_state(own, kept, torch.arange(48)[None], torch.tensor([48]), normalised=kind != "ssd")
    assert off(own[0], moved) < 2e-6


@pytest.mark.parametrize("impl", ["torch", "auto"])
@pytest.mark.parametrize("kind", ["delta", "kda"])
def test_equal_keys_do_not_grow(kind, impl):
    """Their system is as ill as one can be; an inverse by powers of A would be wrong by 1e9."""
    torch.manual_seed(2)
    inputs, state = draw(kind, 1, 64, 1e-3)
    query, key, value, gate, beta = inputs
    inputs = (query, key[:, :1].expand_as(key), value, gate, torch.ones_like(beta))
    chain = Paths(torch.ones(1, 64, 64, dtype=torch.bool).tril())
    out, _ = RULES[kind](*(each.float() for each in inputs), state.float(), chain, impl=impl)
    assert off(out[0, -1], recurrence(kind, inputs, state, [*range(64)], 0)[0]) < 2e-5


@pytest.mark.slow
def test_a_state_keeps_its_digits_over_two_thousand_tokens():
    """Accepted four at a time. With u in bf16 it would be off by 2e-3."""
    torch.manual_seed(3)
    paths, path, count = Paths(torch.ones(1, 4, 4, dtype=torch.bool).tril()), torch.arange(4)[None], torch.tensor([4])
    for strength in (0.01, 1e-4):
        inputs, exact = draw("delta", 1, 2000, strength)
        own = exact.float()
        for begin in range(0, 2000, 4):
            piece = tuple(each[:, begin : begin + 4] for each in inputs)
            _, kept = tree_delta(*(each.float() for each in piece), own, paths)
            accept_state(own, kept, path, count, normalised=True)
            exact = recurrence("delta", piece, exact, [*range(4)], 0)[1][None]
        assert off(own, exact) < 5e-6


@pytest.mark.parametrize("taps", [2, 3, 4])
def test_a_window_is_the_path_and_the_state_before_it(taps):
    torch.manual_seed(4)
    for nodes, climb in ((1, 0.5), (2, 0.0), (40, 0.4), (40, 0.0)):
        parents = [random_parents(nodes, climb) for _ in range(2)]
        window = Paths(torch.stack([mask_of(each) for each in parents])).windows(taps)
        inputs, state = torch.randn(2, nodes, 5), torch.randn(2, taps - 1, 5)
        weight, bias = torch.randn(5, taps), torch.randn(5)
        out = tree_conv(inputs, state, weight, bias, window)
        for node in range(nodes):
            for text in range(2):
                along = torch.cat([state[text], inputs[text, path_of(parents[text], node)]])[-taps:]
                torch.testing.assert_close(out[text, node], (along * weight.T).sum(0) + bias)
            moved = state.clone()
            accept_conv(inputs, moved, window, torch.tensor([node, -1]))
            expected = torch.cat([state[0], inputs[0, path_of(parents[0], node)]])[1 - taps :]
            assert torch.equal(moved[0], expected)
            assert torch.equal(moved[1], state[1])


def off_by_rounding(found: Tensor, expected: Tensor, *, cut: bool = False) -> float:
    """As `off`, but for what rounding to the type of `found` costs, or cutting digits off."""
    unit = 0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps / (1 if cut else 2)
    gap = (found.double() - expected.double()).abs() - unit * expected.double().abs()
    return float(gap.max() / expected.double().abs().max())


def projections(dtype: torch.dtype, batch: int, nodes: int, heads: int):
    """Weights of gates, and two parts [B, N, H] of a product; of some numbers softplus is x, of others it is e^x."""
    joined = (8 * torch.randn(batch, nodes, 3 + 2 * heads)).to(dtype)
    joined[0, 0] = torch.linspace(-100, 100, 3 + 2 * heads)
    weights = GateWeights(*torch.randn(heads, 2).to(dtype).unbind(1))
    return weights, joined[..., 3:].split(heads, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gates_of_a_tree_are_made_of_projections_as_by_transformers(dtype):
    """In one launch, with what they sum up to along each path; strengths in 16 bits are equal to the bit."""
    torch.manual_seed(9)
    rounding = 2e-6 if dtype == torch.float32 else 0 if DEVICE == "cpu" else torch.finfo(dtype).eps
    for nodes, heads in ((1, 1), (37, 4), (20, 33)):
        parents = [random_parents(nodes, 0.4) for _ in range(2)]
        weights, (decay, strength) = projections(dtype, 2, nodes, heads)
        paths = Paths(torch.stack([mask_of(each) for each in parents]).to(DEVICE))
        totals, beta = run_on(DEVICE, totals_of_projected, decay, strength, weights, paths)
        torch.testing.assert_close(beta, strength.sigmoid(), rtol=rounding, atol=rounding / 100)
        opened = (decay.float() + weights.bias).double()
        gates = -weights.log_rate.double().exp() * torch.nn.functional.softplus(opened, threshold=90)
        for text in range(2):
            for node in range(nodes):
                exact = gates[text, path_of(parents[text], node)].sum(0)
                torch.testing.assert_close(totals[text, node], exact, rtol=2e-6, atol=1e-9)
        gate, same = weights.opened(decay, strength)
        assert torch.equal(same, strength.sigmoid())
        plain = path_totals(gate, Paths(paths.mask.cpu()), None, impl="torch")
        torch.testing.assert_close(totals, plain, rtol=2e-6, atol=1e-9)


def agree(
    kind: str, dtype: torch.dtype, nodes: int, climb: float, *, heads=2, key_heads=1, columns=32, values=32,
    projected=False,
):  # fmt: skip
    """Whether the kernels give what the references give of the same numbers in fp32; also behind what is not read.

    projected: whether the kernels make gates and strengths of parts of one product
    """
    key_heads = heads if kind == "kda" else key_heads
    parents = [random_parents(nodes, climb) for _ in range(2)]
    mask = torch.stack([mask_of(each) for each in parents])
    paths, there = Paths(mask), Paths(mask.to(DEVICE))
    channels = 2 * key_heads * columns + heads * values
    inputs, before = torch.randn(2, nodes, channels).to(dtype), torch.randn(2, 3, channels).to(dtype)
    weight, bias = (torch.randn(channels, 4) / 2).to(dtype), torch.randn(channels).to(dtype)
    given = inputs, before, weight, bias, paths.windows(4)
    mixed = tree_conv(*given, impl="torch")
    torch.testing.assert_close(run_on(DEVICE, tree_conv, *given, impl="triton"), mixed)
    parts = mixed.split([key_heads * columns, key_heads * columns, heads * values], -1)
    query, key, value = (
        part.unflatten(-1, (-1, size)) for part, size in zip(parts, (columns, columns, values), strict=True)
    )
    gate = -100 * torch.rand(2, nodes, heads, *[columns] * (kind == "kda")) ** 6  # e^-gate of a few is infinite
    state = torch.randn(2, heads, columns, values)
    rest = () if kind == "ssd" else (torch.rand(2, nodes, heads).to(dtype),)
    given = (query, key, value.float() if kind == "ssd" else value, gate, *rest)
    alone, options = given, {}
    if projected:
        weights, parts = projections(dtype, 2, nodes, heads)
        given, alone = (*given[:3], *parts), (*given[:3], *weights.opened(*parts))
        options = {"weights": weights}
    out, kept = run_on(DEVICE, RULES[kind], *given, state, there, **options, impl="triton")
    expected, plain = RULES[kind](*(each.float() for each in alone), state, paths, impl="torch")
    assert off_by_rounding(out, expected, cut=DEVICE == "cpu") < 2e-6  # as Triton's interpreter does
    assert off(kept.values, plain.values) < 2e-6
    same = {"rtol": 2e-6, "atol": 1e-9} if projected else {"rtol": 1e-13, "atol": 1e-13}
    torch.testing.assert_close(kept.totals, plain.totals, **same)
    path = torch.zeros(2, nodes + 1, dtype=torch.long)
    last = path_of(parents[0], nodes - 1)
    path[0, : len(last)] = torch.tensor(last)
    count, spoiled = torch.tensor([len(last), 0]), kept.values.clone()
    unseen = [node for node in range(nodes) if node not in last]
    spoiled[0, unseen], spoiled[1] = torch.nan, torch.nan  # which nobody may read
    own, other = moved(state.clone(), DEVICE), state.clone()
    spoiled, given = moved((kept._replace(values=spoiled), (path, count)), DEVICE)
    accept_state(own, spoiled, *given, normalised=kind != "ssd", impl="triton")
    accept_state(other, plain, path, count, normalised=kind != "ssd", impl="torch")
    assert off(own.cpu(), other) < 2e-6
    assert torch.equal(own[1].cpu(), state[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", RULES)
def test_kernels_give_what_the_references_give(kind, dtype):
    torch.manual_seed(6)
    agree(kind, dtype, 1, 0.5)
    agree(kind, dtype, 37, 0.4, heads=4, key_heads=2, columns=16, values=16)
    agree(kind, dtype, 35, 0.0, heads=1)  # a chain, of two tiles of ancestors
    agree(kind, dtype, 17, 0.5, values=64)
    if kind == "delta":
        agree(kind, dtype, 37, 0.4, heads=4, key_heads=2, projected=True)


@needs_compiler
@pytest.mark.parametrize("kind", RULES)
def test_compiled_code_gives_what_the_references_give(kind):
    """Of trees in one pass and level by level, with columns that fill vectors and others, and of 16-bit inputs."""
    torch.manual_seed(7)
    for nodes, passes, columns in ((1, 1, 16), (40, 1, 128), (33, 5, 24), (70, 2, 7)):
        mask = torch.stack([mask_of(random_parents(nodes, 0.4)) for _ in range(2)])
        heads, key_heads = (3, 3) if kind == "kda" else (4, 2)
        query, key = torch.randn(2, 2, nodes, key_heads, columns)
        value, beta = torch.randn(2, nodes, heads, columns + 5), torch.rand(2, nodes, heads)
        gate = -40 * torch.rand(2, nodes, heads, *[columns] * (kind == "kda")) ** 8
        given, state = (
            (query, key, value, gate, beta)[: 4 if kind == "ssd" else 5],
            torch.randn(2, heads, columns, columns + 5),
        )
        for dtype in (torch.float32, torch.bfloat16):
            rounded, kept, plain, size = [each.to(dtype) for each in given], None, None, -(-nodes // passes)
            for begin in range(0, nodes, size):
                part = [each[:, begin : begin + size] for each in rounded]
                paths = Paths(mask[:, begin : begin + size, : begin + size])
                out, kept = RULES[kind](*part, state, paths, kept, impl="native")
                expected, plain = RULES[kind](*(each.float() for each in part), state, paths, plain, impl="torch")
                assert out.dtype == (torch.float32 if kind == "ssd" else dtype)
                assert off_by_rounding(out, expected) < 2e-6
                assert off(kept.values, plain.values) < 2e-6
                assert kept.keys.dtype == dtype
                torch.testing.assert_close(kept.totals, plain.totals, rtol=1e-13, atol=1e-13)


def test_recurrent_layers_are_right_in_any_schedule(adversary):
    torch.manual_seed(adversary.seed)
    agree("delta", torch.float32, 35, 0.0, columns=16, values=16)  # a path longer than the nodes taken at once
    agree("ssd", torch.bfloat16, 20, 0.4, columns=16, values=16)
    agree("kda", torch.float32, 20, 0.4, columns=16, values=16)
    agree("delta", torch.bfloat16, 20, 0.4, columns=16, values=16, projected=True)
    adversary.met("_blocks_kernel", "_pairs_kernel", "_totals_kernel", "_accept_kernel", "_convolution_kernel")


@pytest.mark.parametrize("impl", ["triton", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize(("name", "shape"), [
    ("query", (2, 4, 2, 32)), ("key", (2, 4, 3, 16)), ("value", (2, 3, 2, 16)), ("gate", (2, 4, 1)),
    ("beta", (2, 3, 2)), ("state", (1, 2, 16, 16)), ("mask", (2, 3, 3)),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_refused_and_not_read(name, shape, impl):
    device = "cpu" if impl == "native" else DEVICE
    shapes = {
        "query": (2, 4, 2, 16),
        "key": (2, 4, 2, 16),
        "value": (2, 4, 2, 16),
        "gate": (2, 4, 2),
        "beta": (2, 4, 2),
    }
    shapes |= {"state": (2, 2, 16, 16), "mask": (2, 4, 4)}
    *inputs, state, mask = (torch.zeros(each, device=device) for each in (shapes | {name: shape}).values())
    with pytest.raises(ValueError, match=r"\w+ must be \["):
        tree_delta(*inputs, state, Paths(mask.bool()), impl=impl)


@pytest.mark.parametrize("change", [{"weight": (6, 3)}, {"weight": (5, 4)}, {"state": (1, 3, 6)}, {"bias": (1,)}])
def test_a_convolution_refuses_shapes_that_do_not_fit(change):
    shapes = {"inputs": (2, 5, 6), "state": (2, 3, 6), "weight": (6, 4), "bias": (6,)} | change
    given = [torch.zeros(shape, device=DEVICE) for shape in shapes.values()]
    with pytest.raises(ValueError, match=r"\w+ must be \[.* beside a window \[2, 5, 4\]"):
        tree_conv(*given, torch.zeros(2, 5, 4, dtype=torch.long, device=DEVICE), impl="triton")


def test_a_state_is_not_moved_by_what_does_not_fit_it():
    state, path = torch.zeros(2, 2, 16, 16, device=DEVICE), torch.zeros(2, 3, dtype=torch.long, device=DEVICE)
    kept = KeptNodes(*(torch.zeros(2, 4, 2, *columns, device=DEVICE) for columns in ((16,), (16,), ())))
    for wrong in (kept._replace(values=kept.values[:1]), kept._replace(totals=kept.totals[..., :1])):
        with pytest.raises(ValueError, match=r"(values|totals) must be \["):
            accept_state(state, wrong, path, path[:, 0], normalised=True, impl="triton")
    with pytest.raises(ValueError, match=r"count must be \[2\]"):
        accept_state(state, kept, path, path[:1, 0], normalised=True, impl="triton")


def test_what_the_kernels_do_not_take_is_refused():
    inputs, state = moved(draw("delta", 2, 4, 1.0), DEVICE)
    wide = [each.float().repeat(1, 1, 1, *[2] * (each.dim() - 3)) for each in inputs]  # 32 and 16 columns
    states, every = torch.zeros(4, 2, 32, 16, device=DEVICE), torch.ones(2, 4, 6, dtype=torch.bool, device=DEVICE)
    for given, before, seen, message in (
        ([each.float() for each in inputs], state.float(), every[..., :4], "powers of two, 16 or more, got 16 and 8"),
        (wide, states[:2].double(), every[..., :4], r"contiguous states in float32, got torch\.float64"),
        (wide, states[::2], every[..., :4], "contiguous states"),
        (wide, states[:2], every, "takes trees in one pass"),
    ):
        with pytest.raises(ValueError, match=message):
            tree_delta(*(each for each in given), before, Paths(seen), impl="triton")


@pytest.mark.parametrize("impl", ["torch", "triton", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("kind", RULES)
def test_a_batch_may_be_empty(kind, impl):
    rows, gate, state = torch.zeros(0, 3, 2, 16), torch.zeros(0, 3, 2), torch.zeros(0, 2, 16, 16)
    inputs = rows, rows, rows, rows if kind == "kda" else gate, *[gate] * (kind != "ssd"), state
    *inputs, mask, path, count, window = moved(
        (*inputs, torch.zeros(0, 3, 3).bool(), *(torch.zeros(size).long() for size in ((0, 2), 0, (0, 3, 3)))), DEVICE
    )
    out, kept = RULES[kind](*inputs, Paths(mask), impl=impl)
    assert out.shape == (0, 3, 2, 16)
    impl = "torch" if impl == "native" else impl  # which these two do not have
    accept_state(inputs[-1], kept, path, count, normalised=True, impl=impl)
    few, weight = rows[..., 0, :8], torch.zeros(8, 3, device=DEVICE)
    assert tree_conv(few.to(DEVICE), few[:, :2].to(DEVICE), weight, None, window, impl=impl).shape == (0, 3, 8)
