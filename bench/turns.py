"""Does a service that keeps rows of ended texts write the same texts, and how much sooner does a second turn begin?

    python bench/turns.py [--conversations 500] [--first 600] [--threads 2] [--json bench/results/turns-cpu.json]

Random conversations of two turns with the shipped pair: a first prompt of `--first` tokens of the shipped prompts or
fewer, its answer of 24 tokens, and a second turn of 5 to 25 tokens more. Each conversation is asked of two services by
`ersd`, greedy or sampled: one that keeps rows of texts that have ended, and one that keeps none. They take turns in
beginning, so that what the machine does meanwhile meets both alike.

first token: seconds from the second turn's request to its first token, median; and with rows divided by without

Exits with 1 if a text differs, or no row was taken over.
"""

import random
import sys

from common import Spread, argument_parser, environment, options_of, quiet_demo_pair, write_results

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.serving import Completed, Service

ROOM, NEW, NEW_AFTER = 1000, 24, 8  # tokens of a slot, and of the two answers
WAYS = {"kept": None, "none": 0}  # bytes for rows of texts that have ended


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--first", type=int, default=600, help="tokens of the first prompt, at most")
    parser.add_argument("--seed", type=int, default=0)
    arguments = options_of(parser, conversations=3, first=60)
    count, longest = arguments.conversations, arguments.first
    pair = quiet_demo_pair()
    pool = pair.tokenizer("\n".join(demo_prompts())).input_ids
    decoder = SpeculativeDecoder(pair.target, pair.draft, "ersd")
    services = {way: decoder.serve(1, max_tokens=ROOM, prefix_bytes=kept) for way, kept in WAYS.items()}
    chance, wrong, reused = random.Random(arguments.seed), 0, 0
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        for number in range(count):
            first, more = drawn(pool, longest, chance)
            temperature, texts = chance.choice([0.0, 0.6]), {}
            for way in [*WAYS][:: 1 if number % 2 else -1]:
                one, other = turns(services[way], first, more, temperature, number)
                texts[way] = one.tokens, other.tokens
                seconds[way].append(other.seconds_to_first or 0.0)
                reused += other.reused_tokens
            wrong += texts["kept"] != texts["none"]
    finally:
        for service in services.values():
            service.close(graceful=False)
    ratio = Spread.of(kept / none for kept, none in zip(seconds["kept"], seconds["none"], strict=True))
    spreads = {way: Spread.of(1e3 * each for each in found) for way, found in seconds.items()}
    print(f"{count} conversations, {2 * count} texts each way, {wrong} of the conversations differ")
    print(f"first token of the second turn, ms: {spreads['kept']} with rows kept, {spreads['none']} without")
    print(f"ratio: {ratio}; {reused / count:.0f} tokens of a second prompt were not computed")
    write_results(
        arguments.json, environment("cpu", arguments, "conversations", "first"),
        wrong=wrong, reused_tokens=reused, ratio=ratio._asdict(),
        first_ms={way: each._asdict() for way, each in spreads.items()},
    )  # fmt: skip
    return 1 if wrong or not reused else 0


def drawn(pool: list[int], longest: int, chance: random.Random) -> tuple[list[int], list[int]]:
    """A first prompt and what the second turn adds."""
    begin = chance.randrange(len(pool) - longest)
    length, asked = chance.randint(longest // 3, longest), chance.randrange(len(pool) - 25)
    return pool[begin : begin + length], pool[asked : asked + chance.randint(5, 25)]


def turns(service: Service, first: list[int], more: list[int], temperature: float, seed: int) -> list[Completed]:
    """Both answers of a conversation."""
    answer = service.submit(first, NEW, temperature, seed=seed, eos_token_id=None).result()
    prompt = [*first, *answer.tokens, *more]
    return [answer, service.submit(prompt, NEW_AFTER, temperature, seed=seed, eos_token_id=None).result()]


if __name__ == "__main__":
    sys.exit(main())
