"""What the values of a conformance row stand for: models, drafts, decoders and settings, and texts in each way.

Texts are lists of new tokens, one for each prompt.
"""

import string
from copy import deepcopy
from dataclasses import replace
from functools import cached_property, lru_cache, partial

import numpy as np
import torch
from block_checkpoints import random_block
from conformance_rows import GROWING, RECURRENT
from families import tiny
from head_cases import head_of
from mtp_checkpoints import mtp_of
from own_drafts import Bigrams
from processed_texts import odd_behind_even
from profile_cases import ACCEPTED, counts, profile_of, way_of
from recurrent_families import recurrent
from tiny_models import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import logits_process as theirs

from heavypath.speculative import (
    Cascade,
    EarlyExit,
    Grammar,
    Lookahead,
    MedusaHeads,
    Merge,
    Mixture,
    Pard,
    PromptLookup,
    Recall,
    Retrieval,
    SpeculativeDecoder,
    TokenTree,
    Translated,
    load_streamed,
    stream_of,
    top_down,
)
from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.drafts.kinds import describe
from heavypath.speculative.drafts.medusa.heads import MedusaConfig
from heavypath.speculative.methods import measured_row
from heavypath.speculative.streaming.file import BLOCK

EOS, SEED = 5, 4
NEW = {"graph": 6, "streamed": 9}  # tokens, where each step takes long
NEW_OF_TYPE = {"float32": 14, "bfloat16": 8, "float16": 8}  # of 16 bits less is asked
PROMPTS = ([3, 1, 4, 1, 6, 2, 2, 0, 3, 6, 1], [6, 2, 0], [1, 1, 2, 0, 4, 4, 3, 1], [2, 6, 6, 1], [0, 3, 3])
BATCHES = {"one": [0], "two": [1, 4], "padded": [0, 1, 2], "five padded": [2, 1, 0, 3, 4]}
FAMILIES = {"mistral": {"sliding_window": 8}, "gemma3_text": {"sliding_window": 8}, "gpt_oss": {"sliding_window": 8}}
TREE = TokenTree([-1, 0, 0, 2, 2, 0, 5])
DEEP = TokenTree([*range(-1, 8), 0])
LARK = 'start: "a" (tail | "b" start)\ntail: "c" | "d" tail "e"'
FILTERS = {"none": {}, "top-k": {"top_k": 4}, "top-p": {"top_p": 0.85}, "min-p": {"min_p": 0.1}}
OF_ONE_TARGET = ("head", "p-eagle", "medusa", "mtp", "block")


@lru_cache
def model_of(kind, dtype, layers=2, head_dim=8):
    """A random model; those of one family share their vocabulary, toys have seven tokens."""
    if kind == "toy llama":
        model = tiny_llama(3, layers=layers, head_dim=head_dim)
    elif kind in RECURRENT:
        model = recurrent.__wrapped__(kind, 3, twice=layers > 2)
    elif kind == "toy gpt2":
        model = tiny("gpt2", vocab_size=7, n_layer=layers, n_head=32 // head_dim)
    else:
        model = tiny(kind, num_hidden_layers=layers, head_dim=head_dim, **FAMILIES.get(kind, {}))
    return model.to(getattr(torch, dtype))


@lru_cache
def streamed(kind, dtype, folder):
    """The same, of six layers, some of which are read from disk in each pass."""
    whole = model_of(kind, dtype, 6)
    whole.save_pretrained(folder / f"{kind}-{dtype}")
    sizes = [sum(part.nbytes for part in each.parameters()) for each in layers_of(whole)]
    others = sum(part.nbytes for part in whole.parameters()) - sum(sizes)
    blocks = {"mixtral": 5, "kimi_linear": 12}.get(kind, 2)  # beyond a layer's bytes; experts have files of their own
    memory = others + 3 * (max(sizes) + blocks * BLOCK)  # one layer stays, two pass
    model = load_streamed(folder / f"{kind}-{dtype}", memory, [0], offload_folder=folder / "offloaded")
    assert stream_of(model) is not None
    return model


def layers_of(model):
    base = model.get_decoder()
    return base.layers if hasattr(base, "layers") else base.h


@lru_cache
def tokenizer_of(vocab_size):
    """A token for each letter or digit, an end, and one token of two letters."""
    letters = [each for each in string.ascii_letters + string.digits if each != "f"]
    tokens = dict(zip(letters, [*range(5), *range(7, 7 + len(letters))], strict=False)) | {"<end>": EOS, "ab": 6}
    tokens = {word: token for word, token in tokens.items() if token < vocab_size}
    tokenizer = Tokenizer(models.BPE(tokens, [("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@lru_cache
def other_tokenizer_of(vocab_size):
    """The same letters but for one, in another order, without the token of two letters, and with another one of two."""
    words = [word for word in tokenizer_of(vocab_size).get_vocab() if word not in ("ab", "e")]
    tokens = {word: token for token, word in enumerate([*sorted(words, reverse=True), "cd"])}
    tokenizer = Tokenizer(models.BPE(tokens, [("c", "d")]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@lru_cache
def translated_of(vocab_size, dtype, **settings):
    """A small draft of that tokenizer, for targets of so many tokens."""
    other = other_tokenizer_of(vocab_size)
    return Translated(tiny_llama(9, len(other), layers=1, **settings).to(dtype), other, tokenizer_of(vocab_size))


@lru_cache
def small_of(vocab_size, dtype, head_dim):
    """A draft model of so many tokens."""
    return tiny_llama(9, vocab_size, layers=1, head_dim=head_dim).to(dtype)


@lru_cache
def head_for(kind, target, head_dim):
    """A random head, or another draft of its own weights for one target: no test changes it."""
    torch.manual_seed(2)
    kinds = {
        "head": lambda: head_of(target, taps=(0, 1, 2), head_dim=head_dim),
        "p-eagle": lambda: head_of(target, taps=(0, 1, 2), head_dim=head_dim, mask_token_id=3),
        "medusa": lambda: medusa_of(target),
        "mtp": lambda: mtp_of(target),
        "block": lambda: random_block(target, head_dim),
    }
    return kinds[kind]()


@lru_cache
def grammar_of(vocab_size):
    return Grammar.lark(LARK, tokenizer_of(vocab_size))


def naive(log_target, log_draft, children):
    """A rule for one node: the token is a sample of the target."""
    return log_target.exp()


def recall_of(texts):
    """A `Recall` that has learned these texts already."""
    recall = Recall(512, max_ngram=4)
    for text in texts:
        recall.learn(np.array(text))
    return recall


def medusa_of(target):
    config = target.config.get_text_config()
    heads = MedusaHeads(MedusaConfig(8, 1, config.hidden_size, config.vocab_size, owns_lm_heads=True))
    torch.manual_seed(2)
    for part in heads.parameters():
        torch.nn.init.normal_(part, std=0.3)
    return heads.requires_grad_(False).eval().to(target.dtype)


class Case:
    """A row of the suite, with all that it names."""

    def __init__(self, row, folder=None):
        self.row, self.folder = row, folder
        self.layers = 6 if row["way"] == "streamed" else 2
        self.new_tokens = NEW.get(row["way"], NEW_OF_TYPE[row["dtype"]])
        self.head_dim = 16 if row["way"] == "graph" else 8  # kernels take no smaller ones

    @cached_property
    def target(self):
        return model_of(self.row["target"], self.row["dtype"], self.layers, self.head_dim)

    @cached_property
    def exact_target(self):
        """The target's weights in fp32."""
        return deepcopy(model_of(self.row["target"], self.row["dtype"], self.layers, self.head_dim)).float()

    @cached_property
    def small(self):
        """A draft model of the same vocabulary."""
        return small_of(self.vocab_size, self.target.dtype, self.head_dim)

    @cached_property
    def vocab_size(self):
        return self.target.config.get_text_config().vocab_size

    @cached_property
    def draft(self):
        generator = torch.Generator().manual_seed(6)
        corpus = torch.randint(0, self.vocab_size, (4, 60), generator=generator).tolist()
        kinds = {
            "model": lambda: self.small,
            "the target": lambda: self.target,
            **{kind: partial(head_for, kind, self.target, self.head_dim) for kind in OF_ONE_TARGET},
            "pard": lambda: Pard(self.small, mask_token_id=3),
            "lookup": PromptLookup,
            "retrieval": lambda: Retrieval(corpus),
            "recall": lambda: recall_of(corpus),
            "lookahead": lambda: Lookahead(window=3, ngram=3),
            "early exit": lambda: EarlyExit(1),
            "translated": lambda: translated_of(self.vocab_size, self.target.dtype, head_dim=self.head_dim),
            "mixture": lambda: Mixture([self.small, PromptLookup()]),
            "cascade": lambda: Cascade([self.small, PromptLookup()], levels=[1, 8]),
            "merge": lambda: Merge([self.small, PromptLookup()]),
            "own": lambda: Bigrams(2 * torch.randn(self.vocab_size, self.vocab_size, generator=generator)),
            "none": lambda: None,
        }
        return kinds[self.row["draft"]]()

    @cached_property
    def verifier(self):
        return {"default": None, "own": top_down(naive)}.get(self.row["verifier"], self.row["verifier"])

    @cached_property
    def profile(self):
        """Made-up costs and counts of this pair and method; by batch, where larger batches have smaller trees."""
        row = measured_row(self.row["method"], self.verifier, "cpu")
        entries = [counts(ACCEPTED, temperature=each, way=way_of(row, each)) for each in (0.0, 1.0)]
        costs = {1: Costs({1: 0.01, 4: 0.012, 16: 0.02}, 0.001)}
        if self.row["tree"] == "by batch":
            costs[4] = Costs({1: 0.01, 4: 0.02, 16: 0.1}, 0.002)
        draft = "none" if self.draft is None else describe(self.draft)
        facts = {"dtype": self.row["dtype"], "device_type": "cpu"}
        return replace(
            profile_of(*entries), target=describe(self.target), draft=draft, verifier=self.verifier, environment=facts,
            costs=CostsByBatch(costs),
        )  # fmt: skip

    @cached_property
    def options(self):
        """Those of the decoder."""
        method, tree = self.row["method"], self.row["tree"]
        of_method = {
            "specinfer": {"width": 2}, "spectr": {"width": 2}, "rsd-c": {"branching": [2, 2]},
            "dyspec": {"confidence": "draft", "width": 2}, "rsd-s": {"width": 2, "max_depth": 2},
            "eagle-2": {"width": 3, "max_depth": 2},
        }  # fmt: skip
        deep = {"width": 2, "max_depth": 8, "tree_size": 20} if method in GROWING else {"tree": DEEP}
        trees = {
            "of 6 nodes": {"tree_size": 6},
            "own": {"tree": TREE},
            "deep": deep,
            "by options": of_method.get(method, {"acceptance": [0.5, 0.3, 0.1], "max_depth": 3, "tree_size": 9}),
            "threshold": {"threshold": 0.2, "tree_size": 9},
            "profile": {"profile": self.profile},
            "by batch": {"profile": self.profile},
            "replanned": {"profile": self.profile, "replan": True},
        }
        drafted = {
            "other filters": {"draft_temperature": 1.3, "draft_top_k": 5, "draft_top_p": 0.95, "draft_min_p": 0.01},
            "temperature 0": {"draft_temperature": 0.0},
        }
        given = {} if self.verifier is None else {"verifier": self.verifier}
        return given | trees.get(tree, {}) | drafted.get(self.row["drafted at"], {})

    def decoder(self, **changes):
        target = self.target
        if self.row["way"] == "streamed":
            target = streamed(self.row["target"], self.row["dtype"], self.folder)
        return SpeculativeDecoder(target, self.draft, self.row["method"], **self.options | changes)

    def plain_decoder(self):
        return SpeculativeDecoder(self.target, None, "autoregressive")

    # Settings of a text.

    @cached_property
    def sampling(self):
        """How the target is sampled, as both generates take it."""
        penalty = {"repetition_penalty": 1.3} if self.row["rule"] == "penalty" else {}
        least = {"min_new_tokens": 3} if self.row["rule"] == "least length" else {}
        return FILTERS[self.row["filter"]] | penalty | least

    @cached_property
    def ending(self):
        if self.row["stop"] == "strings":
            words = ["ba", "dd", "kZ", "x", "Q"]
            return {"eos_token_id": None, "stop_strings": words, "tokenizer": tokenizer_of(self.vocab_size)}
        return {"eos_token_id": EOS if self.row["stop"] == "token" else None}

    def processors(self, place):
        """The logits processors of a sequence of the batch."""
        bias = {(token,): 2.0 for token in range(1, self.vocab_size, 3)} | {(2, 1): -3.0, (1, 3): -6.0}
        no_grammar = not self.row["grammar"]  # which may have only one way to go on
        kinds = {
            "class": [theirs.SequenceBiasLogitsProcessor(bias)] + [theirs.NoRepeatNGramLogitsProcessor(3)] * no_grammar,
            "function": [odd_behind_even],
            "by sequence": [[odd_behind_even], [], [theirs.SequenceBiasLogitsProcessor(bias)]][place % 3],
        }
        return kinds.get(self.row["processors"], [])

    def constraints_of(self, places):
        """Processors, grammars and functions of what may follow, as the decoder takes them for these sequences."""
        own = {place: self.processors(place) for place in {*places}}
        grammars = [grammar_of(self.vocab_size)] if self.row["grammar"] else []
        if self.row["processors"] == "by sequence":
            given = {"logits_processor": [own[place] or None for place in places]} if any(own.values()) else {}
        else:
            given = {"logits_processor": own[places[0]] + grammars} if own[places[0]] + grammars else {}
        return given | self.allowed

    @cached_property
    def allowed(self):
        if self.row["processors"] != "allowed tokens":
            return {}
        rows = [[token for token in range(self.vocab_size) if token % 3 != last] for last in range(3)]
        return {"prefix_allowed_tokens_fn": lambda number, text: rows[int(text[-1]) % 3]}

    @property
    def members(self):
        return BATCHES[self.row["batch"]]
