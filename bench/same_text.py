"""Does a change of the code change a text? Digests of texts by every method, draft and way, under fixed seeds.

    python bench/same_text.py --json before.json                        # before the change, and
    python bench/same_text.py --json after.json --against before.json   # after it, on the same machine

50 prompts of the shipped pair are decoded at temperature 0, 0.6 and 1, alone and in batches of 8: by all methods with
the draft model; by four of them with every other draft; by each verifier; with penalties, processors and a grammar;
from a past; through a stream of weights; by a service; and by transformers' generate. Texts that differ are named, and
the exit status is then 1. Sums of floats depend on the machine and the versions of its libraries: compare what one of
them wrote.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from common import argument_parser, environment, options_of, quiet_demo_pair, write_results
from safetensors.torch import save_file
from transformers import NoRepeatNGramLogitsProcessor

from heavypath.speculative import (
    METHODS,
    Cascade,
    EarlyExit,
    Grammar,
    Lookahead,
    Merge,
    Mixture,
    PromptLookup,
    Retrieval,
    SpeculativeDecoder,
    TokenTree,
    load_demo_head,
    load_draft,
    load_streamed,
)
from heavypath.speculative.demo import FOLDER, DemoPair, demo_prompts

TEMPERATURES = (0.0, 0.6, 1.0)
BATCH = 8
NEW_TOKENS = 16
SOME = ("chain", "sequoia", "dyspec", "ersd")  # methods that every draft is tried with
MERGED = ("specinfer", "naive")

Texts = Iterator[tuple[str, list[int]]]  # the name of a text, and its new tokens


def fifty_prompts() -> list[str]:
    """The held-out prompts, their first halves, and two short ones."""
    texts = demo_prompts()
    return [*texts, *(text[: len(text) // 2] for text in texts), "import os", "x", "def"][:50]


def medusa_heads(target: Any, folder: Path) -> Any:
    """Three random heads."""
    torch.manual_seed(0)
    width, vocabulary = target.config.hidden_size, target.config.vocab_size
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = torch.randn(width, width) / width
        tensors[f"{head}.0.linear.bias"] = torch.zeros(width)
        tensors[f"{head}.1.weight"] = target.lm_head.weight.detach() + 0.1 * torch.randn(vocabulary, width)
    folder.mkdir()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "demo/target"}
    (folder / "config.json").write_text(json.dumps(config))
    return load_draft(str(folder), target)


def every_draft(pair: DemoPair, folder: Path) -> dict[str, Any]:
    """Drafts by name."""
    target, draft, tokenizer = pair
    return {
        "head": load_demo_head(target),
        "medusa": medusa_heads(target, folder / "medusa"),
        "lookup": PromptLookup(),
        "lookahead": Lookahead(window=4, ngram=3),
        "retrieval": Retrieval(demo_prompts(), tokenizer),
        "early exit": EarlyExit(2),
        "cascade": Cascade([draft, PromptLookup()], [2, 2]),
        "mixture": Mixture([draft, PromptLookup()]),
    }


class Decoding:
    """Prompts, and how they are decoded: each way gives (name of a text, its new tokens)."""

    def __init__(self, pair: DemoPair, prompts: list[str]):
        self.pair, self.prompts = pair, prompts

    def alone(self, name: str, decoder: SpeculativeDecoder, prompts: Iterable[str], **options: Any) -> Texts:
        """Each prompt by itself."""
        for number, prompt in enumerate(prompts):
            ids = self.pair.tokenizer(prompt, return_tensors="pt").input_ids
            out = decoder.generate(ids, NEW_TOKENS, seed=number, **options)
            yield f"{name} alone {number}", out.sequences[0, ids.shape[1] :].tolist()

    def together(self, name: str, decoder: SpeculativeDecoder, **options: Any) -> Texts:
        """Prompts of several lengths in batches."""
        for first in range(0, len(self.prompts), BATCH):
            inputs = self.pair.tokenizer(self.prompts[first : first + BATCH], return_tensors="pt", padding=True)
            out = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS, seed=first, **options)
            for row, text in enumerate(out.sequences[:, inputs.input_ids.shape[1] :].tolist()):
                yield f"{name} together {first + row}", text

    def served(self, name: str, decoder: SpeculativeDecoder) -> Texts:
        """Requests that come at once, at alternating temperatures."""
        with decoder.serve(slots=4, max_tokens=256) as service:
            requests = [
                service.submit(
                    self.pair.tokenizer(prompt).input_ids, NEW_TOKENS, temperature=TEMPERATURES[number % 3], seed=number
                )
                for number, prompt in enumerate(self.prompts)
            ]
            for number, request in enumerate(requests):
                yield f"{name} served {number}", request.result().tokens

    def turns(self, name: str, decoder: SpeculativeDecoder, temperature: float) -> Texts:
        """A second turn after each text, from its cache."""
        for number, prompt in enumerate(self.prompts[::5]):
            ids = self.pair.tokenizer(prompt, return_tensors="pt").input_ids
            first = decoder.generate(ids, NEW_TOKENS, temperature=temperature, seed=number)
            further = torch.cat([first.sequences, ids], 1)
            second = decoder.generate(further, NEW_TOKENS, temperature=temperature, seed=number, past=first.cache)
            yield f"{name} past {number}", second.sequences[0, further.shape[1] :].tolist()

    def by_transformers(self, name: str, decoder: SpeculativeDecoder) -> Texts:
        """transformers' generate, with its own settings."""
        options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "no_repeat_ngram_size": 3}
        for number, prompt in enumerate(self.prompts[::5]):
            inputs = self.pair.tokenizer(prompt, return_tensors="pt")
            decode = partial(decoder, seed=number)
            text = self.pair.target.generate(
                **inputs, custom_generate=decode, max_new_tokens=NEW_TOKENS, pad_token_id=0, **options
            )
            yield f"{name} generate {number}", text[0, inputs.input_ids.shape[1] :].tolist()


def every_text(pair: DemoPair, prompts: list[str], folder: Path) -> Texts:
    """All texts."""
    target, draft, tokenizer = pair
    decoding, few = Decoding(pair, prompts), prompts[:10]
    make: Callable[..., SpeculativeDecoder] = partial(SpeculativeDecoder, target)
    for method in METHODS:
        decoder = make(None if method == "autoregressive" else draft, method)
        for temperature in TEMPERATURES:
            name = f"{method} {temperature}"
            yield from decoding.alone(name, decoder, prompts, temperature=temperature)
            yield from decoding.together(name, decoder, temperature=temperature)
        yield from decoding.served(method, decoder)
    drafts = every_draft(pair, folder)
    for given, method in [(given, method) for given in drafts for method in SOME]:
        decoder = make(drafts[given], method)
        for temperature in TEMPERATURES[::2]:
            yield from decoding.alone(f"{given} {method} {temperature}", decoder, few, temperature=temperature)
        yield from decoding.together(f"{given} {method}", decoder, temperature=0.6, top_p=0.9)
        yield from decoding.turns(f"{given} {method}", decoder, 0.6)
    for method in MERGED:
        decoder = make(Merge([draft, PromptLookup()]), method, tree_size=7)
        yield from decoding.together(f"merge {method}", decoder, temperature=0.6)
    for method, verifier in [(name, word) for name, row in METHODS.items() for word in row.verifiers]:
        decoder = make(draft, method, tree_size=8, verifier=verifier)
        yield from decoding.alone(f"{method} {verifier}", decoder, few, temperature=0.6, min_p=0.02)
    for method in SOME:
        deep = {"tree": TokenTree.chain(6)} if method in ("chain", "ersd") else {"tree_size": 24}
        decoder = make(draft, method, **deep)
        yield from decoding.together(f"{method} large", decoder, temperature=0.6, top_k=20, repetition_penalty=1.2)
        yield from decoding.together(f"{method} rules", decoder, temperature=0.0, min_new_tokens=8, stop_strings="\n",
                                     tokenizer=tokenizer)  # fmt: skip
        yield from decoding.turns(method, decoder, 0.6)
        yield from decoding.by_transformers(method, decoder)
        processors = [NoRepeatNGramLogitsProcessor(2), Grammar.regex("[a-z_ ]{4,40}", tokenizer)]
        yield from decoding.alone(f"{method} asked", decoder, few, temperature=0.6, logits_processor=processors)
    streamed = load_streamed(FOLDER / "target", "6M")
    for method in SOME:
        decoder = SpeculativeDecoder(streamed, draft, method, tree_size=16)
        yield from decoding.alone(f"{method} streamed", decoder, few[:4], temperature=0.6)


def main() -> int:
    """Write digests of all texts, and compare them."""
    parser = argument_parser(__doc__)
    parser.add_argument("--against", type=Path, metavar="FILE", help="what an earlier run has written with --json")
    arguments = options_of(parser)
    pair = quiet_demo_pair()
    prompts = fifty_prompts()[: 2 if arguments.miniature else None]
    digests = dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        for name, tokens in every_text(pair, prompts, Path(folder)):
            digests[name] = sha256(str(tokens).encode()).hexdigest()[:16]
    write_results(arguments.json, environment("cpu"), texts=digests)
    print(f"{len(digests)} texts, {len({*digests.values()})} of them different")
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())["texts"]
    differ = [name for name in before.keys() | digests.keys() if before.get(name) != digests.get(name)]
    print(f"{len(differ)} differ from {arguments.against}", *sorted(differ), sep="\n  ")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
