"""Medusa heads as published: both layouts have the logits of the formula, and what does not fit is refused by name."""

import re

import pytest
import torch
from head_checkpoints import tiny_target
from medusa_checkpoints import LAYOUTS, oracle, published, write
from rounding import SMALL_MODEL

from heavypath.speculative import load_draft
from heavypath.speculative.drafts.heads.checkpoint import is_head
from heavypath.speculative.drafts.medusa.checkpoint import is_medusa, load_medusa
from heavypath.speculative.drafts.trained import is_trained_head
from heavypath.speculative.files.checkpoint import Checkpoint
from heavypath.speculative.files.hub import WEIGHTS

TEXT = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def assert_same(heads, tensors, target):
    """It is in eval mode, without gradients, and computes what the formula does, all heads or the first of them."""
    assert not heads.training
    assert not any(parameter.requires_grad for parameter in heads.parameters())
    expected = oracle(tensors, target, TEXT)
    states = target(TEXT[None], output_hidden_states=True).hidden_states[-1][0].detach()
    for some in (len(expected[0]), 1):
        torch.testing.assert_close(heads(states, target.lm_head, some), expected[:, :some], rtol=0, atol=SMALL_MODEL)


@pytest.mark.parametrize("owns", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("heads", "layers", "file", "config"), [
    (1, 1, WEIGHTS["medusa"][0], {}),
    (3, 1, WEIGHTS["medusa"][-1], {"medusa_num_heads": None}),
    (3, 2, WEIGHTS["medusa"][-1], {"medusa_num_heads": 2, "medusa_num_layers": 4}),  # the tensors are believed
    (12, 1, WEIGHTS["medusa"][0], {}),  # in the order of their numbers
])  # fmt: skip
def test_both_layouts_have_the_logits_of_the_formula(heads, layers, file, config, owns, target, tmp_path):
    tensors = published(target, heads, layers, owns)
    loaded = load_medusa(write(tmp_path, tensors, file, **config), target)
    assert (loaded.config.heads, loaded.config.layers, loaded.config.owns_lm_heads) == (heads, layers, owns)
    assert_same(loaded, tensors, target)


def test_a_head_may_be_an_lm_head_alone_and_its_layers_one_that_they_share(target, tmp_path):
    """Medusa's own code makes one block and repeats it."""
    alone, shared = published(target, 2, layers=0), published(target, heads=2, layers=2)
    for head in range(2):
        for kind in ("weight", "bias"):
            shared[f"{head}.1.linear.{kind}"] = shared[f"{head}.0.linear.{kind}"]
    for tensors in (alone, shared):
        assert_same(load_medusa(write(tmp_path, tensors), target), tensors, target)


def test_heads_have_the_targets_dtype_unless_another_is_asked_for(target, tmp_path):
    folder = write(tmp_path, published(target))
    for given in (None, torch.float16):
        loaded = load_medusa(folder, target, dtype=given)
        assert {weight.dtype for weight in loaded.parameters()} == {given or torch.float32}


def refused(folder, target, tensors, *expected):
    with pytest.raises(ValueError, match="cannot draft for this target") as caught:
        load_medusa(write(folder, tensors), target)
    for part in expected:
        assert re.search(part, str(caught.value)), caught.value


@pytest.mark.parametrize("owns", LAYOUTS.values(), ids=LAYOUTS)
def test_every_tensor_that_is_missing_or_of_another_shape_is_named(owns, target, tmp_path):
    tensors = published(target, heads=3, layers=2, owns=owns)
    for name, tensor in tensors.items():
        some = {other: found for other, found in tensors.items() if other != name}
        refused(tmp_path, target, some, rf"1 tensors are missing: {re.escape(name)}; expected those of 3 heads of 2")
        wider = tensors | {name: torch.zeros(tensor.shape[0] + 1, *tensor.shape[1:])}
        shapes = (re.escape(str([*each.shape])) for each in (wider[name], tensor))
        refused(tmp_path, target, wider, re.escape(name), *shapes, "the target that the heads were trained for")


def test_what_is_no_head_for_this_target_is_refused(target, tmp_path):
    whole = published(target)
    more = {"0.1.bias": torch.zeros(40), "medusa_head.0.0.linear.weight": torch.zeros(16, 16)}
    refused(tmp_path, target, whole | more, r"2 tensors are not known: 0\.1\.bias, medusa_head\.0\.0\.lin")
    refused(tmp_path, target, {}, r"0\.0\.linear\.weight, the first layer of the first head, is missing; got nothing")
    other = {"fc.weight": torch.zeros(16, 32)}
    refused(tmp_path, target, other, r"0\.0\.linear\.weight, .* is missing; got fc\.weight")
    whole_numbers = {"1.0.linear.weight": torch.zeros(16, 16, dtype=torch.int8)}
    refused(tmp_path, target, whole | whole_numbers, r"1\.0\.linear\.weight is torch\.int8; expected floating point")
    far = {"999999999.0.linear.bias": torch.zeros(16)}
    refused(tmp_path, target, whole | far, "names are of 1000000000 heads of 1 layers, and there are 10")
    refused(tmp_path, tiny_target(vocab=50), whole, r"0\.1\.weight has shape \[40, 16\], expected \[50, 16\]")
    shared = published(target, owns=False)
    refused(tmp_path, tiny_target(width=24), shared, r"expected \[24, 24\] for a target of width 24")


ODD = {
    "sparse": lambda tensor: tensor.to_sparse(), "of 4 TiB": lambda tensor: tensor[:1, :1].expand(1 << 20, 1 << 20),
    "without values": lambda tensor: tensor.to("meta"), "a scalar": lambda tensor: tensor[0, 0],
    "a number": lambda _: 5, "complex": lambda tensor: tensor.to(torch.complex64),
    "a dict": lambda tensor: {"a": tensor},
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_pickles_with_odd_tensors_are_refused_by_name(odd, target, tmp_path):
    whole, name = published(target), "0.0.linear.weight"
    (tmp_path / "config.json").write_text("{}")
    torch.save(whole | {name: ODD[odd](whole[name])}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_medusa(tmp_path, target)


def test_heads_are_known_by_their_file_also_beside_a_base_that_was_trained_along(target, tmp_path):
    """Medusa-2: one folder is the target and has its heads."""
    (tmp_path / "config.json").write_text("{}")
    assert not is_trained_head(tmp_path)
    folder, tensors = write(tmp_path, published(target)), published(target)
    assert is_medusa(Checkpoint(folder))
    target.save_pretrained(folder)
    assert not is_head(Checkpoint(folder))
    assert is_medusa(Checkpoint(folder))
    assert_same(load_draft(folder, target), tensors, target)
