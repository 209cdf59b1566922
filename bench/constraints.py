"""What logits processors and a grammar cost: tokens per step and seconds, beside plain text and transformers' generate.

    python bench/constraints.py [--prompts 20] [--max-new-tokens 64] [--temperature 0] [--method sequoia] [--json FILE]

Each of ten of transformers' processors, and a JSON schema, on the prompts of the shipped pair. Ours and transformers'
texts are under the same processor; at temperature 0 they are compared, and `same` counts those that are equal. Tokens
per step are all new tokens over all steps; the share is that over the tokens per step of as long texts without
a processor. Seconds are sums over the prompts, one after the other, prefill included: of transformers' own generate, of
ours, and of ours spent on processors.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import argument_parser, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from heavypath.speculative import Grammar, SpeculativeDecoder
from heavypath.speculative.demo import DemoPair, demo_prompts

METHODS = ("sequoia", "ersd", "dyspec")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["file", "folder"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}
SUMS = (
    "tokens",
    "steps",
    "plain_tokens",
    "plain_steps",
    "seconds",
    "processing",
    "plain_seconds",
    "transformers",
    "same",
    "prompts",
)


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--method", action="append", help=f"repeat it for several; default: {', '.join(METHODS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    methods = arguments.method or list(METHODS)
    few, length = (1, 6) if arguments.miniature else (arguments.prompts, arguments.max_new_tokens)

    pair = quiet_demo_pair(arguments.device)
    prompts = token_ids(pair.tokenizer, demo_prompts()[:few], arguments.device)
    grammar = Grammar.json_schema(SCHEMA, pair.tokenizer, whitespace=False)
    sums = {(method, name): dict.fromkeys(SUMS, 0.0) for method in methods for name in [*kinds(1, pair), "json schema"]}
    with until_stopped():
        for seed, ids in enumerate(prompts):
            asked = {"max_new_tokens": length, "temperature": arguments.temperature}
            for name, own in (kinds(ids.shape[1], pair) | {"json schema": grammar}).items():
                reference = grammar.as_processor(ids.shape[1]) if own is grammar else own
                by_transformers, text = timed(partial(plain, pair, ids, reference, asked))
                for method in methods:
                    by = partial(SpeculativeDecoder(pair.target, pair.draft, method).generate, ids, seed=seed)
                    took, out = timed(partial(by, logits_processor=[own], eos_token_id=0, **asked))
                    free = asked | {"max_new_tokens": out.stats.new_tokens}
                    free_took, without = timed(partial(by, eos_token_id=None, **free))
                    same = torch.equal(out.sequences, text)
                    added = (
                        out.stats.new_tokens, out.stats.steps, without.stats.new_tokens, without.stats.steps, took,
                        out.stats.seconds["processing"], free_took, by_transformers, same, 1,
                    )  # fmt: skip
                    found = sums[method, name]
                    found.update({key: found[key] + value for key, value in zip(SUMS, added, strict=True)})
    rows = [row_of(method, name, found) for (method, name), found in sums.items() if found["prompts"]]
    Console(highlight=False, width=140).print(table_of(rows))
    facts = environment(arguments.device) | {"prompts": len(prompts), "max_new_tokens": length}
    write_results(arguments.json, facts | {"temperature": arguments.temperature}, constraints=rows)


def kinds(width: int, pair: DemoPair) -> dict[str, Any]:
    """The processors, for prompts of so many tokens."""
    vocab_size, device = pair.target.config.vocab_size, str(pair.target.device)
    tokens = [*range(5, vocab_size, 9)]
    allowed = [[token for token in range(vocab_size) if token % 3 != last] for last in range(3)]
    bias = {(token,): 2.0 for token in range(3, vocab_size, 17)} | {(1, 2): -4.0, (4, 5, 6): 3.0}
    bad = [[token] for token in tokens] + [[3, 4]]
    begin = range(vocab_size // 2)
    return {
        "repetition penalty": theirs.RepetitionPenaltyLogitsProcessor(1.3),
        "no n-gram twice": theirs.NoRepeatNGramLogitsProcessor(3),
        "bad words": theirs.NoBadWordsLogitsProcessor(bad, eos_token_id=0),
        "suppressed": theirs.SuppressTokensLogitsProcessor(tokens, device=device),
        "suppressed at first": theirs.SuppressTokensAtBeginLogitsProcessor(begin, width, device=device),
        "sequence bias": theirs.SequenceBiasLogitsProcessor(bias),
        "forced end": theirs.ForcedEOSTokenLogitsProcessor(width + 32, 0, device=device),
        "end ever likelier": theirs.ExponentialDecayLengthPenalty((16, 1.2), 0, width),
        "watermark": theirs.WatermarkLogitsProcessor(vocab_size, device, seeding_scheme="lefthash", bias=2.0),
        "allowed by a function": theirs.PrefixConstrainedLogitsProcessor(lambda _, text: allowed[int(text[-1]) % 3], 1),
    }


def plain(pair: DemoPair, ids: Tensor, processor: Any, asked: dict[str, Any]) -> Tensor:
    """transformers' own text."""
    sampling: dict[str, Any] = {"do_sample": False}
    if asked["temperature"] > 0:
        sampling = {"do_sample": True, "temperature": asked["temperature"], "top_k": 0}
    return pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=asked["max_new_tokens"],
        eos_token_id=0,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([processor]),
        **sampling,
    )


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what the call returned."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def row_of(method: str, name: str, found: dict[str, float]) -> dict[str, Any]:
    """The figures of a method under a processor."""
    constrained, free = found["tokens"] / found["steps"], found["plain_tokens"] / found["plain_steps"]
    return {
        "method": method,
        "processor": name,
        "tokens_per_step": round(constrained, 3),
        "without": round(free, 3),
        "share": round(constrained / free, 3),
        "seconds": round(found["seconds"], 3),
        "of_processors": round(found["processing"], 3),
        "seconds_without": round(found["plain_seconds"], 3),
        "seconds_of_transformers": round(found["transformers"], 3),
        "same": int(found["same"]),
        "prompts": int(found["prompts"]),
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    """The rows, and for each method what all of them have together."""
    table = Table(
        "method", "processor", "tokens/step", "without", "share", "s", "of processors", "s without", "s transformers",
        "same", "of",
    )  # fmt: skip
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    for method in dict.fromkeys(row["method"] for row in rows):
        shares = [row["share"] for row in rows if row["method"] == method]
        table.add_row(method, "mean", "", "", f"{sum(shares) / len(shares):.3f}")
    return table


if __name__ == "__main__":
    main()
