"""Tokens per step with a corpus to retrieve from, beside prompt lookup and the shipped draft; and what a query takes.

    python bench/retrieval.py [--prompts 24] [--max-new-tokens 128] [--json bench/results/retrieval-cpu.json]

The corpus is the text that the shipped pair was trained on, and the prompts are from files that were held out. All
drafts decode each prompt under the same seed. Tokens per step are those of all prompts together. A query is what a
draft is asked for the nodes of one level; it is timed behind a text of 300 held-out tokens, and its time is the median.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from common import argument_parser, environment, paper_verifier, quiet_demo_pair, token_ids, write_results
from torch import Tensor

from heavypath.speculative import PromptLookup, Retrieval, SpeculativeDecoder
from heavypath.speculative.demo import DemoPair, corpus, demo_prompts
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.drafts.lookup import LookupDraft
from heavypath.speculative.drafts.retrieval import RetrievalDraft

METHODS, TEMPERATURES = ("chain", "sequoia"), (0.0, 0.6, 1.0)
PREFIX, LEVELS, ROUNDS = 300, (1, 4, 16), 200


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    few = arguments.miniature

    pair, sources = quiet_demo_pair(), corpus.read_corpus()
    texts = [source.text for source in sources if not source.held_out]
    retrieval, built = built_and_loaded(texts[: 5 if few else None], pair)
    print(f"{retrieval}: " + ", ".join(f"{name} {value:.3g}" for name, value in built.items()))

    held_out = "\n".join(source.text for source in sources if source.held_out)[:20_000]
    text = pair.tokenizer(held_out, return_tensors="pt", verbose=False).input_ids[0, 1000 : 1000 + PREFIX + max(LEVELS)]
    device = torch.device("cpu")
    queried = {
        "prompt lookup": LookupDraft(PromptLookup(), pair.target.vocab_size, device),
        "retrieval": RetrievalDraft(retrieval, pair.target.vocab_size, device),
    }
    queries = {name: query_times(draft, text, 2 if few else ROUNDS) for name, draft in queried.items()}
    for name, times in queries.items():
        print(f"{name:<14} " + ", ".join(f"{nodes} nodes {took:.0f} us" for nodes, took in times.items()))

    prompts = token_ids(pair.tokenizer, demo_prompts()[: 1 if few else arguments.prompts])
    drafts = {"prompt lookup": PromptLookup(), "retrieval": retrieval, "draft model": pair.draft}
    facts = environment("cpu") | {"prompts": len(prompts), "max_new_tokens": arguments.max_new_tokens}
    steps = []
    for method in METHODS[: 1 if few else None]:
        for temperature in TEMPERATURES:
            row = {"method": method, "temperature": temperature}
            row |= tokens_per_step(pair, drafts, method, prompts, (arguments.max_new_tokens, temperature))
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            steps.append(row)
            write_results(arguments.json, facts, index=built, query_microseconds=queries, tokens_per_step=steps)


def built_and_loaded(texts: list[str], pair: DemoPair) -> tuple[Retrieval, dict]:
    """A corpus as a user gets it: made, saved and loaded; and what each takes."""
    pair.tokenizer(texts, add_special_tokens=False, verbose=False)  # once, so that the tokenizer is warm
    seconds = {}
    seconds["encode"] = timed(lambda: pair.tokenizer(texts, add_special_tokens=False, verbose=False))[0]
    both, retrieval = timed(lambda: Retrieval(texts, pair.tokenizer))
    seconds["sort"] = both - seconds["encode"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.safetensors"
        seconds["save"], _ = timed(lambda: retrieval.save(path))
        seconds["load"], retrieval = timed(lambda: Retrieval.load(path, pair.tokenizer))
        size = path.stat().st_size
    facts = {f"{name}_seconds": round(value, 4) for name, value in seconds.items()}
    return retrieval, {"tokens": retrieval.tokens, "texts": len(texts), "MiB": round(size / 2**20, 1)} | facts


def timed(call: Callable) -> tuple:
    """Seconds, and what the call returned."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def query_times(draft: Draft, text: Tensor, rounds: int) -> dict[str, float]:
    """Microseconds of a call for so many children of the root."""
    cache = draft.new_cache(1, len(text) + 1)
    draft.prefill(text[None, : PREFIX + 1], cache)
    lengths = torch.tensor([PREFIX])
    times = {}
    for nodes in LEVELS:
        rows = torch.arange(PREFIX + 1, PREFIX + 1 + nodes)[None]
        feed = Feed(
            tokens=text[None, -nodes:],
            positions=rows,
            cache_rows=rows,
            parent_rows=torch.full_like(rows, PREFIX),
            prefix_lengths=lengths,
            visible_rows=len(text) + 1,
            ancestor_mask=torch.ones(nodes, nodes + 1, dtype=torch.bool),
        )
        times[str(nodes)] = round(
            1e6 * median(timed(lambda feed=feed: draft(feed, cache))[0] for _ in range(rounds)), 1
        )
    return times


def tokens_per_step(
    pair: DemoPair, drafts: Mapping[str, object], method: str, prompts: list[Tensor], text: tuple[int, float]
) -> dict[str, float]:
    """Tokens per forward pass of the target with each draft; text: new tokens of each prompt, and the temperature."""
    found = {}
    for name, draft in drafts.items():
        decoder, tokens, steps = SpeculativeDecoder(pair.target, draft, method, verifier=paper_verifier(method)), 0, 0
        for seed, prompt in enumerate(prompts):
            stats = decoder.generate(prompt, text[0], temperature=text[1], seed=seed, eos_token_id=None).stats
            tokens, steps = tokens + text[0], steps + stats.steps
        found[name] = round(tokens / steps, 3)
    return found


if __name__ == "__main__":
    main()
