"""Small models in GGUF files, written by the package `gguf` as llama.cpp's `convert_hf_to_gguf.py` writes them."""

import json

import gguf
import numpy as np
from bench_scripts import script
from tiny_models import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

llama_cpp = script("llama_cpp")  # whose names of weights llama.cpp itself has read
TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps over the fox; one two three four five six"
TEMPLATE = (
    "{% for message in messages %}<user>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<end>{% endif %}"
)
SPECIAL = ["<end>", "<user>", "<turn>"]
END, USER, TURN = 0, 1, 2


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with a few merges and three special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    named = {"bos_token": "<end>", "eos_token": "<end>", "additional_special_tokens": SPECIAL[1:]}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)
    made.chat_template = TEMPLATE
    return made


def gguf_llama(seed: int = 0, **changes):
    """A random Llama for `byte_tokenizer`, with two query heads for a key head."""
    size = len(byte_tokenizer())
    settings = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    settings |= {"max_position_embeddings": 256, "eos_token_id": END, "bos_token_id": END, "tie_word_embeddings": False}
    return tiny_llama(seed, size, **settings | changes)


def write_gguf(model, path, *, kind="F32", leave_out=(), tokenizer=True, metadata=None, tensors=None) -> None:
    """Write a Llama and `byte_tokenizer`.

    kind: ggml's name of the type of matrices
    leave_out: names of tensors that are not written
    metadata, tensors: more entries, by name
    """
    config, kind = model.config, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("a small model")
    llama_cpp.add_shape(writer, config)
    for name, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        (writer.add_uint32 if isinstance(value, int) else add)(name, value)
    if tokenizer:
        _write_tokenizer(writer)
    for name, weight in llama_cpp.weights_of(model).items():
        if name.removesuffix(".weight") in leave_out:
            continue
        array = weight.detach().numpy().astype(np.float32)
        if array.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_header(path, architecture: str, **metadata: int) -> None:
    """Write a file of no tensors, of this architecture, with numbers under its own keys, "a.b" as `a__b`."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        writer.add_uint32(f"{architecture}.{name.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer) -> None:
    tokenizer = byte_tokenizer()
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(END)
    writer.add_eos_token_id(END)
    writer.add_eot_token_id(TURN)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
