"""Processors that keep state in what others made: models, modules, files. Either it is seen, or there is no tree."""

import functools
import os
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from conformance_parts import tokenizer_of
from tiny_models import tiny_llama

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.processors.state import KeptState

IDS = torch.tensor([[1, 2, 1, 2, 1]])
NEW = 24
MODEL, TOKENIZER = tiny_llama(1), tokenizer_of(7)
MODEL.generation_config.notes = []
OF_OWN = types.ModuleType("of_own")
OF_OWN.inner = types.ModuleType("of_own.inner")
FILE = Path("file")  # in a folder of the test
NOTED = False


class Attribute:
    """Where a processor notes that it has forced its token: an attribute of some object."""

    def __init__(self, thing):
        self.thing = thing

    def get(self):
        return getattr(self.thing, "is_noted", False)

    def set(self, value):
        self.thing.is_noted = value


class OfGlobal:
    def get(self):
        return getattr(MODEL.config, "is_noted", False)

    def set(self, value):
        config = MODEL.config
        config.is_noted = value


class OfLayer:
    def get(self):
        return getattr(MODEL.model.layers[1].mlp, "is_noted", False)

    def set(self, value):
        MODEL.model.layers[1].mlp.is_noted = value


class OfContainer:
    def get(self):
        return "is_noted" in MODEL.generation_config.notes

    def set(self, value):
        if value:
            MODEL.generation_config.notes.append("is_noted")
        else:
            MODEL.generation_config.notes.clear()


class OfModule:
    def get(self):
        return getattr(torch, "is_noted", False)

    def set(self, value):
        torch.is_noted = value


class OfSubmodule:
    def get(self):
        return getattr(torch.nn.functional, "is_noted", False)

    def set(self, value):
        torch.nn.functional.is_noted = value


class OfOwnModule:
    def get(self):
        return getattr(OF_OWN.inner, "is_noted", False)

    def set(self, value):
        OF_OWN.inner.is_noted = value


class OfBuiltins:
    def get(self):
        import builtins

        return getattr(builtins, "is_noted", False)

    def set(self, value):
        import builtins

        builtins.is_noted = value


class OfLibraryClass:
    def get(self):
        return getattr(transformers.LogitsProcessor, "is_noted", False)

    def set(self, value):
        transformers.LogitsProcessor.is_noted = value


class OfEnvironment:
    def get(self):
        return os.environ.get("IS_NOTED") == "1"

    def set(self, value):
        os.environ["IS_NOTED"] = str(int(value))


class OfFile:
    def get(self):
        return os.path.exists(FILE)

    def set(self, value):
        if value:
            open(FILE, "w").close()
        else:
            FILE.unlink(missing_ok=True)


class OfPath:
    def get(self):
        return FILE.is_file()

    def set(self, value):
        (FILE.touch if value else functools.partial(FILE.unlink, missing_ok=True))()


class ByName:
    def get(self):
        return getattr(MODEL.config, "is_noted", False)

    def set(self, value, name="is_"):
        setattr(MODEL.config, name + "noted", value)


class ByGlobals:
    def get(self):
        return NOTED

    def set(self, value):
        globals()["NOT" + "ED"] = value


@functools.cache
def store():
    return {}


class OfCache:
    def get(self):
        return store().get("is_noted", False)

    def set(self, value):
        store()["is_noted"] = value


@functools.lru_cache
def counted(value):
    return value


class OfCounts:
    """Notes something by how often a store of results was asked."""

    def get(self):
        return counted.cache_info().misses > 0

    def set(self, value):
        if value:
            counted(1)
        else:
            counted.cache_clear()


SEEN = {
    "config": lambda: Attribute(MODEL.config),
    "model": lambda: Attribute(MODEL),
    "tokenizer": lambda: Attribute(TOKENIZER),
    "global": OfGlobal,
    "layer": OfLayer,
    "module": OfModule,
    "submodule": OfSubmodule,
    "own module": OfOwnModule,
    "builtins": OfBuiltins,
    "class": OfLibraryClass,
    "container": OfContainer,
    "environment": OfEnvironment,
    "cache": OfCache,
}
UNSEEN = {"file": OfFile, "path": OfPath, "name": ByName, "globals": ByGlobals, "counts": OfCounts}


class Once:
    """Forces a token at the first call for a text of some length."""

    def __init__(self, place, length):
        self.place, self.length = place, length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length and not self.place.get():
            self.place.set(True)
            scores = scores.clone()
            scores[:, 3] += 99
        return scores


@pytest.mark.parametrize("kind", SEEN | UNSEEN)
def test_a_token_that_is_forced_once_is_forced_where_transformers_does(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = (SEEN | UNSEEN)[kind]()
    decoder = SpeculativeDecoder(MODEL, MODEL, "sequoia", tree_size=6)
    for length in (7, 8, 10, 13):
        place.set(False)
        usual = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = MODEL.generate(IDS, **usual, logits_processor=[Once(place, length)])
        place.set(False)
        out = decoder.generate(IDS, NEW, temperature=0.0, eos_token_id=None, logits_processor=[Once(place, length)])
        assert torch.equal(out.sequences, expected), length
        assert place.get()
        assert (out.stats.steps < NEW / 2) == (kind in SEEN)
    place.set(False)


class Usual:
    """What processors usually have: models, tables by token, settings, a log; it keeps nothing between its calls."""

    def __init__(self):
        self.model, self.tokenizer = MODEL, TOKENIZER
        self.open, self.table = 0, {3: torch.ones(7)}

    def __call__(self, input_ids, scores):
        import json
        import math

        self.open = 0
        settings = json.loads(os.environ.get("SETTINGS", "{}")), sys.maxsize, transformers.__version__
        last = self.tokenizer.decode(input_ids[0, -1:]) if settings else ""
        size = torch.get_default_dtype(), torch.nn.functional.softmax(scores, -1), MODEL.config.vocab_size
        return scores + math.log(1) * mask(len(last), size[2])


@functools.cache
def mask(length, size):
    return torch.zeros(size)


@functools.cache
def vocabulary():
    return TOKENIZER.get_vocab()


USUAL = {
    "usual": Usual,
    "function": lambda: lambda input_ids, scores: torch.where(scores > len(vocabulary()), 0.0, scores),
    "of transformers": lambda: functools.partial(transformers.NoRepeatNGramLogitsProcessor(3)),
    "in a list": lambda: transformers.LogitsProcessorList([transformers.TopKLogitsWarper(3), Usual()]).__call__,
}


@pytest.mark.parametrize("kind", USUAL)
def test_what_keeps_nothing_keeps_its_trees(kind):
    own = USUAL[kind]()
    assert KeptState([own]).unseen == ""
    decoder = SpeculativeDecoder(MODEL, MODEL, "chain", tree_size=5)
    out = decoder.generate(IDS, NEW, temperature=0.0, eos_token_id=None, logits_processor=[own])
    assert out.stats.steps < NEW / 2


def test_a_name_of_a_file_may_be_a_users_own():
    """It is that of a function of this module; `Usual` has an attribute of such a name."""
    assert not KeptState([lambda input_ids, scores: exists(scores)]).unseen
    assert "names exists" in KeptState([lambda input_ids, scores: scores if FILE.exists() else -scores]).unseen


def exists(scores):
    return scores


def test_what_other_programs_keep_is_not_seen():
    assert "socket" in KeptState([lambda input_ids, scores: scores + len(socket.gethostname())]).unseen
    assert "subprocess" in KeptState([lambda input_ids, scores: subprocess.run(["true"]) and scores]).unseen


def test_a_module_that_is_imported_in_a_call_is_looked_at(monkeypatch):
    def count(input_ids, scores):
        import of_own

        of_own.calls += 1
        return scores

    assert "imports of_own" in KeptState([count]).unseen
    monkeypatch.setitem(sys.modules, "of_own", OF_OWN)
    OF_OWN.calls = 0
    kept = KeptState([count])
    assert not kept.unseen
    count(None, None)
    assert kept.has_changed()
    kept.put_back()
    assert OF_OWN.calls == 0
    assert not kept.has_changed()
