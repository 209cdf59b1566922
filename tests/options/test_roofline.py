"""The costs that are estimated for a GPU, against arithmetic done by hand, and the trees that follow from them."""

import pytest
import torch
from gpu_hardware import H100
from recurrent_families import recurrent
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.speculative import METHODS, SpeculativeDecoder, TokenTree, load_demo_pair
from heavypath.speculative.costs.estimates import Work, pass_seconds
from heavypath.speculative.costs.gpu_step import SIZES, attention_to, estimated_costs
from heavypath.speculative.costs.roofline import Device
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.draft import NO_DRAFT
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.tree_choice import chosen_tree, default_tree
from heavypath.speculative.tree_policy import FixedTree, TreeByCosts
from heavypath.speculative.trees.growth import Growth
from heavypath.speculative.trees.tails import Usual
from heavypath.speculative.trees.tree import ROOT

GPU = torch.device("cuda", 0)


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H100)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    return Device.of(GPU)


def test_a_pass_takes_the_time_of_its_weights_until_the_products_take_longer(h100):
    assert h100.bandwidth == pytest.approx(3.35e12, rel=0.01), "the data sheet's"
    assert h100.tensor_peak == pytest.approx(989e12, rel=0.01)
    llama = Work(weight_bytes=2 * 6_600_000_000, weights=6_600_000_000, layers=32, itemsize=2)
    reading = 13.2e9 / (0.85 * h100.bandwidth)  # 4.6 ms
    small = 32 * 6 * 2e-6
    assert h100.pass_seconds(llama, 1) == pytest.approx(reading + small, rel=1e-3)
    assert h100.pass_seconds(llama, 4096) == pytest.approx(2 * 4096 * 6.6e9 / (0.6 * h100.tensor_peak), rel=0.01)
    times = [h100.pass_seconds(llama, tokens) for tokens in (1, 32, 64, 128, 256)]
    assert times == sorted(times)


def test_the_work_of_a_pass_is_that_of_its_layers_and_of_no_embedding_that_is_looked_up():
    for tied in (False, True):
        model = tiny_llama(1, vocab_size=50, layers=2, tie_word_embeddings=tied)
        weights = sum(weight.numel() for weight in model.parameters()) - (0 if tied else 50 * 16)
        assert Work.of(LlamaForward(model)) == Work(4 * weights, weights, 2, 4)
    whole, half = (Work.of(LlamaForward(tiny_llama(1, layers=4), layers=layers)) for layers in (None, (0, 1)))
    assert (half.layers, half.weights) == (2, whole.weights // 2), "an early exit"


def test_a_pass_reads_the_experts_that_its_tokens_choose_and_the_states_once(h100):
    """Of Qwen3-Next's 512 experts 10 for one token, 75 for 8, 367 for 64; a state is read twice and written once."""
    moe = Work(512 * 10**9, 512, 0, 2, expert_bytes=512 * 10**9, expert_weights=512, chosen=10 / 512)
    read = [h100.pass_seconds(moe, tokens) * 0.85 * h100.bandwidth / 10**9 for tokens in (1, 8, 64)]
    assert read == pytest.approx([10, 75, 367], rel=0.01)
    model = recurrent("qwen3_next")
    forward = forward_of(model, "target")
    work = Work.of(forward)
    experts = [weight for name, weight in model.named_parameters() if ".experts." in name]
    assert (work.expert_weights, work.chosen) == (sum(weight.numel() for weight in experts), 0.5)
    kept = 2 * (4 * 8 * 8 * 4 + 3 * 64 * 4) + 8  # in two layers a state and a convolution's, in fp32, and a position
    assert forward.state_bytes == kept
    costs = estimated_costs(forward, [], h100, 3).step[1]
    forward.state_bytes = 0
    assert costs - estimated_costs(forward, [], h100, 3).step[1] == pytest.approx(9 * kept / h100.bandwidth, rel=1e-3)


def test_the_default_tree_of_a_mixture_of_experts_is_small(h100):
    """Of 80 billion weights, of which 77 are those of 512 experts; a token goes through 10."""
    dense = Work(160 * 10**9, 80 * 10**9, 48, 2)
    sparse = dense._replace(expert_bytes=154 * 10**9, expert_weights=77 * 10**9, chosen=10 / 512)
    costs = [Costs({size: h100.pass_seconds(work, size) for size in SIZES}, 0.3e-3) for work in (dense, sparse)]
    for method in ("sequoia", "dyspec", "rsd-s", "specinfer"):
        large, small = (len(default_tree(method, each)) for each in costs)
        assert small < large / 2, method


def test_costs_rise_with_nodes_and_a_level_costs_a_pass_of_the_draft(h100, demo_pair):
    target, draft = (LlamaForward(model) for model in demo_pair[:2])
    costs, without = estimated_costs(target, [draft], h100), estimated_costs(target, [], h100)
    assert list(costs.step.values()) == sorted(costs.step.values())
    assert costs.step == without.step
    assert 0 < without.level < costs.level < costs.step[1]


SEVEN_BILLION = Costs({1: 5.1e-3, 32: 5.15e-3, 64: 5.3e-3, 128: 6e-3}, 0.1e-3)  # with a draft of 68M, in seconds
SMALL = Costs({1: 1e-3, 32: 1e-3, 64: 1e-3, 128: 1e-3}, 0.4e-3)  # hardly larger than its draft


@pytest.mark.parametrize("method", [method for method in METHODS if method != "autoregressive"])
def test_trees_are_no_deeper_than_levels_pay(method, caplog):
    for costs, deepest in ((SEVEN_BILLION, 8), (SMALL, 3)):
        tree = default_tree(method, costs)
        assert isinstance(tree, Growth) == isinstance(METHODS[method].tree_of(8), Growth)
        assert 1 <= tree.depth <= deepest
        assert 2 <= len(tree) <= 128
    assert not caplog.text
    slow = default_tree(method, Costs({1: 1.0, 64: 1.5}, 0.9))
    assert (len(slow), slow.depth) == (2, 1)
    assert "no tree is expected to pay" in caplog.text
    assert default_tree(method, Costs({1: 1.0, 64: 1.5}, 1.0)) == ROOT
    assert "no tree can pay, even if the draft were always right: a level costs 1.00 of a step" in caplog.text


def test_nothing_is_said_of_a_tree_whose_shape_is_given(demo_pair, caplog):
    """By the costs of a draft that is its target no tree pays, so that nothing is drafted by default."""
    target = demo_pair[0]
    for method, options in (
        ("rsd-c", {"branching": [2, 1]}),
        ("sequoia", {"tree_size": 4}),
        ("chain", {"tree_size": 3}),
    ):
        assert len(SpeculativeDecoder(target, target, method, **options).tree) > 2
    assert not caplog.text
    assert len(SpeculativeDecoder(target, target).tree) == 1
    assert "drafting nothing" in caplog.text


def test_a_chain_is_as_long_as_its_expected_tokens_pay_for():
    # Level 0.15 of a step and acceptance a = 0.5688: (1 - a^(L + 1)) / (1 - a) / (1 + 0.15 L), by hand
    # 1.364 for one token, 1.456, 1.431, and 1.363 for four.
    constant = Usual(0.5688, harder=1.0)
    tree = default_tree("chain", Costs({1: 1.0, 128: 1.0}, 0.15), usual=constant)
    assert tree.parents.tolist() == [-1, 0, 1]
    assert len(default_tree("autoregressive", SEVEN_BILLION)) == 1


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_on_a_cpu_reads_and_multiplies_at_once(threads, monkeypatch):
    """By hand, for 600 MB: one thread reads 15 GB/s and multiplies 0.1 Tops; (40^2.5 + 48^2.5)^(1 / 2.5) = 58.41."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    large = Work(600_000_000, 150_000_000, layers=10, itemsize=4)
    beside = 10 * 3e-3 + 11 * (0.01 if threads == 1 else 0.02)  # milliseconds
    assert 1e3 * pass_seconds(large, 1, 1) - beside == pytest.approx(40.0 / threads, rel=0.01)
    assert 1e3 * pass_seconds(large, 16, 1) - beside == pytest.approx(58.41 / threads, rel=0.001)
    assert pass_seconds(large, 1000, 1) == pytest.approx(3.0 / threads, rel=0.001)
    alike = pass_seconds(large, 2, 8) - pass_seconds(large, 16, 1)
    assert alike == pytest.approx(7 * 10 * 3e-6), "rows of other sequences cost the same, besides their attention"


def test_a_decoder_on_a_gpu_says_that_its_tree_is_by_estimated_costs(h100, demo_pair, monkeypatch):
    decoder = SpeculativeDecoder(*demo_pair[:2])
    out = decoder.generate(torch.tensor([[1, 2]]), 3)
    assert out.stats.tree == "5 nodes, 3 levels, by costs estimated for a CPU"
    monkeypatch.setattr(LlamaForward, "device", property(lambda self: GPU))
    target, draft = decoder._target, decoder._draft
    tree, chosen_by = chosen_tree("sequoia", {}, target, draft)
    assert chosen_by == "by costs estimated for NVIDIA H100"
    expected, _ = default_tree("sequoia", estimated_costs(target, [draft.forward], h100)).reordered("heavy_path")
    assert torch.equal(tree.parents, expected.parents)
    shallow, chosen_by = chosen_tree("sequoia", {"max_depth": 2}, target, draft)
    assert (shallow.depth, len(shallow)) == (2, len(tree))
    assert chosen_by == "by the options given"


@pytest.fixture
def grouped(monkeypatch):
    """A model of 8B's shapes on a GPU, without values: 32 query heads and 8 key heads of 128."""
    shape = {"hidden_size": 64, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    target = LlamaForward(tiny_llama(1, layers=2, vocab_size=50, **shape).to(torch.bfloat16))
    monkeypatch.setattr(LlamaForward, "device", property(lambda self: GPU))
    return target


@pytest.mark.parametrize(("length", "nodes", "bound"), [
    (131_072, 1, "reading"), (131_072, 40, "reading"), (131_072, 64, "products"), (8192, 128, "products"),
])  # fmt: skip
def test_attention_reads_the_cache_or_multiplies_whichever_is_longer(length, nodes, bound, grouped, h100):
    reading = 2 * 2 * 8 * 128 * length * 2 / (0.75 * h100.bandwidth)  # keys and values of two layers
    products = 4 * 32 * 128 * length * nodes * 2 / (0.45 * h100.tensor_peak)
    assert (reading > products) == (bound == "reading")
    assert attention_to(grouped, length, h100).seconds(nodes) == pytest.approx(max(reading, products))


def test_a_window_bounds_what_attention_reads(grouped, h100):
    whole = attention_to(grouped, 8192, h100).seconds(64)
    grouped.windows = {1024}
    assert attention_to(grouped, 8192, h100).seconds(64) == pytest.approx(whole / 8)
    assert attention_to(grouped, 512, h100).seconds(64) == pytest.approx(whole / 16)


def test_default_trees_shrink_with_the_prompt(grouped, h100, monkeypatch):
    """With the time of an 8B's weights, and the attention of two of its layers for that of 32: a prompt 16 as long."""
    work = Work(16 * 10**9, 8 * 10**9, 32, 2)
    monkeypatch.setattr(Work, "of", classmethod(lambda cls, model: work))
    policy = TreeByCosts("sequoia", METHODS["sequoia"], grouped, NO_DRAFT)
    plain, sizes = Filters(), []
    for length in (0, 4095, 4096, 131_072, 2**20, 2**22):
        own = policy.for_length(length)
        sizes.append(len(own.tree(plain, 1)))
        assert own.for_length(length) is own
        assert (own is policy) == (length < 4096)
        assert own.for_length(0) is own or length >= 4096
        assert own.chosen_by.endswith(f" and {length:,} tokens") == (length >= 4096)
    assert sizes[:2] == sizes[:1] * 2
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2
    assert policy.for_length(2**20 + 5) is policy.for_length(2**20), "rounded to a power of two"


def test_a_generation_takes_the_tree_of_its_prompts_length(demo_pair, monkeypatch):
    """What the policy is asked for, and what it then gives."""
    decoder = SpeculativeDecoder(*demo_pair[:2])
    other, asked = FixedTree(TokenTree.chain(2), "by length"), []

    def for_length(length):
        asked.append(length)
        return other

    monkeypatch.setattr(decoder.trees, "for_length", for_length)
    out = decoder.generate(torch.tensor([[1, 2, 3], [4, 5, 6]]), 3, temperature=0.0)
    assert out.stats.tree == "3 nodes, 2 levels, by length"
    assert {*asked} == {3}
    assert decoder.warm_up(prompt_tokens=7, max_new_tokens=2) > 0
    assert {*asked} == {3, 7}


def test_on_a_cpu_the_length_does_not_matter(demo_pair):
    decoder = SpeculativeDecoder(*demo_pair[:2])
    assert decoder.trees.for_length(100_000) is decoder.trees
    assert FixedTree(TokenTree.chain(2), "").for_length(100_000).tree(Filters(), 1) == TokenTree.chain(2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_tree_of_this_gpu_has_few_levels():
    pair = load_demo_pair(device="cuda")[:2]
    for method in METHODS:
        decoder = SpeculativeDecoder(pair[0], None if method == "autoregressive" else pair[1], method)
        assert decoder.tree.depth <= 8
        assert torch.cuda.get_device_name() in decoder.trees.chosen_by
