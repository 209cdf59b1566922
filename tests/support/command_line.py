"""Helpers of tests/cli/test_cli.py and its neighbours."""

import copy
import re
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from heavypath.speculative import loading
from heavypath.speculative.cli import support
from heavypath.speculative.cli.app import main
from heavypath.speculative.costs.threads import Load

WORDS = ("zero", "one", "two", "three", "four", "five", "six")


@pytest.fixture
def loaded_once(demo_pair, monkeypatch):
    """Commands that load the shipped pair get the one that is there, with a tokenizer of their own."""
    load = loading.load_demo_pair

    def there(dtype, device):
        if dtype != torch.float32 or torch.device(device).type != "cpu":
            return load(dtype, device)
        return demo_pair._replace(tokenizer=copy.deepcopy(demo_pair.tokenizer))

    monkeypatch.setattr(loading, "load_demo_pair", there)


@pytest.fixture
def heavypath(capsys, monkeypatch, loaded_once):
    """Run the command in this process: (exit code, standard output, standard error). The machine seems to be idle."""
    monkeypatch.setattr(support, "current_load", lambda: Load(0.0, 2, 1))

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def save_llama(folder, words=WORDS, seed=0):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"vocab_size": len(words), "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=None))
    model.save_pretrained(folder)
    vocabulary = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    vocabulary.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of random weights that fit together and that don't."""
    root = tmp_path_factory.mktemp("models")
    save_llama(root / "target")
    save_llama(root / "draft", seed=1)
    save_llama(root / "more words", (*WORDS, "seven"))
    save_llama(root / "other words", ("zéro", "un", "deux", "trois", "quatre", "cinq", "sixième"))
    for name in ("no weights", "no tokenizer", "broken weights", "half the layers"):
        shutil.copytree(root / "target", root / name)
    (root / "no weights" / "model.safetensors").unlink()
    for file in (root / "no tokenizer").glob("tokenizer*"):
        file.unlink()
    (root / "broken weights" / "model.safetensors").write_bytes(b"not safetensors")
    model = save_llama(root / "nan weights")
    model.lm_head.weight.data[0, 0] = torch.nan
    model.save_pretrained(root / "nan weights")
    LlamaConfig.from_pretrained(root / "target", num_hidden_layers=2).save_pretrained(root / "half the layers")
    t5 = T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=7)
    T5ForConditionalGeneration(t5).save_pretrained(root / "t5")
    (root / "empty").mkdir()
    (root / "empty.txt").touch()
    (root / "latin1.txt").write_bytes(b"caf\xe9")
    return root


def assert_refused(outcome, code, message):
    assert outcome[:2] == (code, "")
    assert outcome[2].startswith("heavypath: ")
    assert outcome[2].count("\n") == 1
    assert re.search(message, outcome[2])
