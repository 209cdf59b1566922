"""Options of wrong types are refused by their names, whoever takes them, and a number may be of NumPy or a tensor."""

import inspect
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_llama
from transformers import GenerationConfig

from heavypath.kernels.filtering import Filters
from heavypath.speculative import (
    EarlyExit,
    SpeculativeDecoder,
    TokenTree,
    calibrate,
    compare,
    expected_tokens,
    greedy_tree,
    load_draft,
    select_tree,
    sequoia_tree,
)
from heavypath.speculative import options as options_module
from heavypath.speculative.options import ANOTHER_WAY, HARMLESS, SERVED, UNSERVED, DecoderOptions, GenerateOptions

IDS = torch.tensor([[1, 2, 3]])
NO_NUMBERS = {
    "a text": "0.7", "a list": [1, 2], "a list of texts": ["1"], "True": True, "a complex number": 1j,
    "an object": object(), "a tensor of two": torch.tensor([1, 2]), "a dictionary": {"a": 1}, "bytes": b"1",
}  # fmt: skip
ODD = {"nan": math.nan, "inf": math.inf, "a fraction": 2.5, "-inf": -math.inf}


@pytest.fixture(scope="module")
def target():
    return tiny_llama(1)


@pytest.fixture(scope="module")
def draft():
    return tiny_llama(2)


@pytest.fixture(scope="module")
def decoder(target, draft):
    return SpeculativeDecoder(target, draft)


@pytest.fixture(scope="module")
def service(decoder):
    with decoder.serve(slots=1) as service:
        yield service


def refused(name, call, given):
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**{name: given})
    assert name in str(caught.value), f"{name} = {given!r}: {caught.value}"


def number_options(has):
    return [name for name in has.__annotations__ if name in options_module.NUMBERS]


METHOD_OF = {"width": "dyspec", "threshold": "dyspec", "epsilon": "typical-lossy", "delta": "typical-lossy"}


def shown(value):
    """The same in each process: an address is not."""
    return type(value).__name__ if " at 0x" in str(value) else str(value)


@pytest.mark.parametrize("given", [*NO_NUMBERS.values(), *ODD.values()], ids=[*NO_NUMBERS, *ODD])
def test_numbers_of_generate_a_decoder_and_a_service(given, target, draft, decoder, service):
    fits = (
        {"temperature", "repetition_penalty", "draft_temperature", "deadline"} if given is ODD["a fraction"] else set()
    )
    fits |= {"deadline"} if given is ODD["inf"] else set()
    for name in {"max_new_tokens", "temperature", *number_options(GenerateOptions)} - fits:
        refused(name, lambda **odd: decoder.generate(IDS, **{"max_new_tokens": 3} | odd), given)
    for name in {*number_options(DecoderOptions)} - fits:
        method = METHOD_OF.get(name, "sequoia")
        refused(name, lambda method=method, **odd: SpeculativeDecoder(target, draft, method, **odd), given)
    for name in {"max_new_tokens", "temperature", "seed", "deadline", "logprobs", "prompt_logprobs", "top_p"} - fits:
        refused(name, lambda **odd: service.submit([1, 2], **{"max_new_tokens": 3} | odd), given)
    for name in ("slots", "max_tokens", "queue", "prefill_tokens", "prefix_bytes", "seed", "unseeded"):
        refused(name, decoder.serve, given)
    for name in ("batch_size", "prompt_tokens", "max_new_tokens", "top_k"):
        refused(name, decoder.warm_up, given)


@pytest.mark.parametrize("given", NO_NUMBERS.values(), ids=[*NO_NUMBERS])
def test_numbers_of_trees_comparisons_and_calibrations(given, target, draft):
    rates = [0.5, 0.2]
    refused("size", lambda **odd: sequoia_tree(rates, **odd), given)
    refused("size", lambda **odd: greedy_tree(rates, **odd), given)
    for name in ("max_depth", "max_branching"):
        refused(name, lambda **odd: sequoia_tree(rates, 4, **odd), given)
    refused("max_depth", lambda **odd: greedy_tree(rates, 4, **odd), given)
    for name in ("draft_cost", "max_depth"):
        refused(name, lambda **odd: select_tree(rates, {2: 1.1}, **{"draft_cost": 0.1} | odd), given)
    refused("verify_cost", lambda verify_cost: select_tree(rates, {2: verify_cost}, 0.1), given)
    refused("length", TokenTree.chain, given)
    for name in ("sequences", "length"):
        refused(name, lambda **odd: TokenTree.independent(**{"sequences": 2, "length": 2} | odd), given)
    for name in ("branching", "depth"):
        refused(name, lambda **odd: TokenTree.k_ary(**{"branching": 2, "depth": 2} | odd), given)
    refused("block_size", TokenTree([-1, 0]).occupied_blocks, given)
    for name in ("max_new_tokens", "temperature", "top_k", "seed", "repeats"):
        refused(name, lambda **odd: compare(target, draft, [IDS], **odd), given)
    for name in ("tokens", "sequences", "seed", "limit", "top_p"):
        refused(name, lambda **odd: calibrate(target, draft, **odd), given)
    if not isinstance(given, list | torch.Tensor):
        refused("layers", EarlyExit, given)
    for name in Filters._fields:
        refused(name, lambda **odd: Filters(**odd).check(), given)


@pytest.mark.parametrize(("name", "call", "given"), [
    ("parents", TokenTree, "1"), ("parents", TokenTree, True), ("parents", TokenTree, ["a"]),
    ("ranks", lambda ranks: TokenTree([-1, 0], ranks), {}), ("branching", TokenTree.from_branching, 2.0),
    ("verify_cost", lambda verify_cost: select_tree([0.5], verify_cost, 0.1), [1.0]),
    ("acceptance", lambda acceptance: sequoia_tree(acceptance, 4), "high"),
    ("acceptance", lambda acceptance: sequoia_tree(acceptance, 4), {"a": 1}),
    ("tree", lambda tree: expected_tokens(tree, [0.5]), [1, 2]), ("layers", EarlyExit, ["1"]),
    ("path_or_name", lambda path_or_name: load_draft(path_or_name, None), None),
], ids=shown)  # fmt: skip
def test_what_is_no_list_of_numbers_or_no_tree(name, call, given):
    refused(name, call, given)


@pytest.mark.parametrize(("name", "given"), [
    ("output_scores", "no"), ("output_logits", 1), ("stop_strings", 3), ("tokenizer", "gpt2"), ("streamer", object()),
    ("streamer", [1]), ("trace", 1.0), ("past", [1]), ("model_inputs", [1]), ("eos_token_id", ["a"]),
    ("eos_token_id", [1.5]), ("eos_token_id", "</s>"), ("eos_token_id", [True]), ("pad_token_id", "<pad>"),
    ("attention_mask", [1, 1, 1]), ("attention_mask", torch.ones(3)), ("attention_mask", torch.ones(1, 4)),
    ("sequence_ids", torch.tensor([1.0])), ("sequence_ids", [1]), ("input_ids", IDS.float()), ("input_ids", IDS[0]),
    ("input_ids", [[1, 2]]), ("input_ids", "text"), ("input_ids", IDS.int()),
], ids=shown)  # fmt: skip
def test_other_options_of_generate(name, given, decoder):
    refused(name, lambda **odd: decoder.generate(**{"input_ids": IDS, "max_new_tokens": 3} | odd), given)


@pytest.mark.parametrize(("name", "given"), [
    ("cuda_graphs", "yes"), ("replan", 1), ("profile", 3), ("tree", [1]), ("verifier", 3), ("confidence", 0.3),
    ("method", ["chain"]), ("branching", "32"), ("branching", 3), ("branching", [2, "2"]),
])  # fmt: skip
def test_other_options_of_a_decoder(name, given, target, draft):
    method = {"method": "rsd-c" if name == "branching" else "dyspec"}
    refused(name, lambda **odd: SpeculativeDecoder(target, draft, **method | odd), given)


@pytest.mark.parametrize("given", ["tokens", [1.5], [[1, 2]], None, 3])
def test_a_prompt_that_is_none_is_refused_by_a_service(given, service):
    refused("input_ids", service.submit, given)


@pytest.mark.parametrize("kind", [np.float32, np.float64, torch.tensor, lambda value: torch.tensor([value])])
def test_numbers_of_numpy_and_tensors_of_one_element_are_numbers(kind, target, draft):
    def whole(number):
        return np.int64(number) if isinstance(kind, type) else kind(number)

    expected = SpeculativeDecoder(target, draft, tree_size=6, draft_temperature=0.5)
    same = SpeculativeDecoder(target, draft, tree_size=whole(6), draft_temperature=kind(0.5))
    usual = {"temperature": 0.5, "top_p": 0.75, "min_p": 0.0625, "repetition_penalty": 1.25}
    usual_integers = {"max_new_tokens": 9, "seed": 3, "top_k": 5, "eos_token_id": 2, "pad_token_id": 0}
    given = {name: kind(number) for name, number in usual.items()}
    given |= {name: whole(number) for name, number in usual_integers.items()}
    out = same.generate(IDS, **given)
    assert torch.equal(out.sequences, expected.generate(IDS, **usual, **usual_integers).sequences)
    assert sequoia_tree([0.5, 0.2], whole(6)) == sequoia_tree([0.5, 0.2], 6)
    assert TokenTree.chain(whole(3)) == TokenTree.chain(3)
    assert len(EarlyExit(whole(1)).indices) == 1


@pytest.mark.parametrize("several", [torch.tensor([2, 3]), np.array([2, 3]), (2, 3), {2, 3}, range(2, 4)])
def test_ends_of_a_text_are_any_several_tokens(several, decoder):
    expected = decoder.generate(IDS, 9, eos_token_id=[2, 3]).sequences
    assert torch.equal(decoder.generate(IDS, 9, eos_token_id=several).sequences, expected)


@pytest.mark.parametrize(("name", "hint"), [
    ("inputs_embeds", "model_inputs="), ("adapter_names", "set_adapter"), ("assistant_model", "SpeculativeDecoder"),
    ("num_return_sequences", "repeat the prompt"), ("generation_config", "one by one"), ("use_cache", "caches of its"),
    ("max_time", "MaxTimeCriteria"),
])  # fmt: skip
def test_an_argument_of_transformers_is_answered_with_what_does_it_here(name, hint, decoder):
    with pytest.raises(TypeError, match=f"has no option {name!r}; .*{hint}"):
        decoder.generate(IDS, **{name: 1})


def test_embeddings_alone_are_refused_and_so_is_a_prompt_of_nothing(target, decoder):
    embeds = target.get_input_embeddings()(IDS)
    with pytest.raises(ValueError, match="does not support inputs_embeds alone: give as input_ids the tokens"):
        target.generate(inputs_embeds=embeds, custom_generate=decoder, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"of shape \[1, 0\] and inputs_embeds; give the tokens that they stand for"):
        decoder.generate(IDS[:, :0], 3, model_inputs={"inputs_embeds": embeds})
    with pytest.raises(ValueError, match="reads tokens alone; leave it out, and give the tokens as input_ids"):
        target.generate(IDS, inputs_embeds=embeds, custom_generate=decoder, max_new_tokens=3)


# What a generation_config may have, beside transformers' defaults: a value that is no default of any of them.
SETTINGS = {
    "num_beams": 2, "num_beam_groups": 2, "penalty_alpha": 0.5, "dola_layers": "low", "constraints": ["x"],
    "force_words_ids": [[1]], "token_healing": True, "assistant_ensemble_weight": 0.5, "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1, "speculation_type": "dflash", "use_mtp": True, "use_cache": False,
    "cache_implementation": "static", "prefill_chunk_size": 3, "output_attentions": True, "output_hidden_states": True,
}  # fmt: skip


def test_every_setting_of_transformers_is_served_or_harmless_or_refused():
    """A setting that a new version brings belongs into one of the tables of output/options.py."""
    tables = (SERVED, HARMLESS, {*ANOTHER_WAY}, {*options_module._UNSERVED})
    theirs = {*vars(GenerationConfig())}
    assert theirs - set().union(*tables) == set()
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert {*SETTINGS} == {*ANOTHER_WAY, *UNSERVED}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_is_not_served_is_refused_by_name(name, target, decoder, monkeypatch):
    config = GenerationConfig(max_new_tokens=3, pad_token_id=0)
    setattr(config, name, SETTINGS[name])
    with pytest.raises(ValueError, match=f"does not support {name}={SETTINGS[name]!r}".replace("[", r"\[")):
        decoder(target, IDS, generation_config=config)
    monkeypatch.setattr(target, "generation_config", config)
    if name in UNSERVED:
        with pytest.raises(ValueError, match=f"generation_config has {name}="):
            decoder.generate(IDS, 3)
    else:
        decoder.generate(IDS, 3)


def test_a_setting_of_a_later_transformers_is_refused_where_it_is_set(target, decoder, monkeypatch):
    usual = GenerationConfig.__init__

    def later(self, *args, **kwargs):
        made = kwargs.pop("invert_text", None)
        usual(self, *args, **kwargs)
        self.invert_text = made

    monkeypatch.setattr(GenerationConfig, "__init__", later)
    unset = GenerationConfig(max_new_tokens=3, eos_token_id=None)
    monkeypatch.setattr(target, "generation_config", unset)
    decoder.generate(IDS, 3)
    monkeypatch.setattr(target, "generation_config", GenerationConfig(max_new_tokens=3, invert_text=2))
    with pytest.raises(ValueError, match="generation_config has invert_text=2, a setting of a later transformers"):
        decoder.generate(IDS, 3)
    with pytest.raises(ValueError, match="does not support invert_text=2: it is a setting of a later transformers"):
        decoder(target, IDS, generation_config=target.generation_config)


def test_all_number_options_are_in_the_table():
    declared = {**DecoderOptions.__annotations__, **GenerateOptions.__annotations__}
    for name, kind in declared.items():
        words = str(getattr(kind, "__forward_arg__", kind))
        if words.replace(" | None", "") in ("int", "float", "<class 'int'>", "<class 'float'>"):
            assert name in options_module.NUMBERS, name
    assert {"batch_size", "prompt_tokens"} < {*inspect.signature(SpeculativeDecoder.warm_up).parameters}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of PEFT
@pytest.mark.parametrize("names", [["default", "other"], ["default", "__base__"], ["other", "other"]], ids=str)
def test_adapters_that_differ_by_the_row_of_a_batch_are_refused(names):
    """Rows of a batch change places; one adapter for all of them is decoded."""
    base, config = tiny_llama(1), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(base, config)
    model.add_adapter("other", config)
    model.eval()
    decoder, ids = SpeculativeDecoder(base, tiny_llama(2)), torch.tensor([[1, 2, 3], [2, 3, 1]])
    told = {"input_ids": ids, "max_new_tokens": 3, "pad_token_id": 0}
    assert torch.equal(model.generate(**told, custom_generate=decoder), model.generate(**told))
    with pytest.raises(ValueError, match=r"target has adapter_names=\[.*choose it by set_adapter"):
        model.generate(**told, custom_generate=decoder, adapter_names=names)
    with pytest.raises(ValueError, match="target has adapter_names="):  # PEFT leaves its hooks after an error
        decoder.generate(ids, 3)
    with pytest.raises(ValueError, match="draft has adapter_names="):
        SpeculativeDecoder(tiny_llama(2), base)


def test_no_streamers_for_a_prompt_are_refused_and_not_taken_for_none_at_all(decoder):
    with pytest.raises(ValueError, match="streamer must be one for each sequence, got 0 streamers for a batch of 1"):
        decoder.generate(IDS, 3, streamer=[])


def test_a_streamer_that_is_false_to_python_gets_the_text(decoder):
    class Texts:
        heard = ()

        def __len__(self):
            return 0

        def put(self, tokens):
            self.heard += (*tokens.flatten().tolist(),)

        def end(self):
            self.heard += ("end",)

    texts = Texts()
    out = decoder.generate(IDS, 3, streamer=texts)
    assert texts.heard == (*out.sequences[0].tolist(), "end")
