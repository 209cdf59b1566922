"""The second turn of a chat with and without the first one's cache: seconds to the first token.

    python bench/chat.py [--history 900] [--new 16] [--rounds 15] [--threads 2] [--json bench/results/chat-cpu.json]

A text of `history` tokens is cached, and a turn of `new` tokens comes behind it. What is timed is all until a streamer
gets the first new tokens: the prefill of what is not cached, and the first step. In each round both are timed, and the
one that was second before goes first; a ratio is taken within the round. What is printed are medians, and the quartiles
of the ratio.
"""

import time
from statistics import median, quantiles

import torch
from common import argument_parser, environment, quiet_demo_pair, write_results
from torch import Tensor

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts

METHODS = ("autoregressive", "sequoia", "dyspec")


def main() -> None:
    parser = argument_parser(__doc__, device=True)
    parser.add_argument("--history", type=int, default=900, help="tokens of the chat so far")
    parser.add_argument("--new", type=int, default=16, help="tokens of the turn")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    pair = quiet_demo_pair(arguments.device)
    tokens = pair.tokenizer("\n\n".join(demo_prompts()), return_tensors="pt").input_ids.to(arguments.device)
    text = tokens[:, : arguments.history + arguments.new]
    results = []
    for method in METHODS:
        decoder = SpeculativeDecoder(pair.target, pair.draft, method)
        rounds = [in_turns(decoder, text, arguments.history, index) for index in range(-1, arguments.rounds)][1:]
        low, ratio, high = quantiles((cached / whole for whole, cached in rounds), n=4)
        whole, cached = (1e3 * median(seconds) for seconds in zip(*rounds, strict=True))
        print(f"{method:<16}{whole:7.1f} ms, with past {cached:6.1f} ms; ratio {ratio:.3f} ({low:.3f} - {high:.3f})")
        results.append(
            {"method": method, "ms": whole, "ms_with_past": cached, "ratio": ratio, "quartiles": [low, high]}
        )
    facts = environment(arguments.device) | {name: vars(arguments)[name] for name in ("history", "new", "rounds")}
    write_results(arguments.json, facts, first_token=results)


def in_turns(decoder: SpeculativeDecoder, text: Tensor, history: int, index: int) -> tuple[float, float]:
    """Seconds to the first token of the turn, without and with the cache; both must give the same text."""
    past = decoder.generate(text[:, :history], 2, temperature=0.0, eos_token_id=None).cache
    seconds, answers = {}, []
    for given in (None, past) if index % 2 else (past, None):
        clock = FirstToken()
        out = decoder.generate(text, 8, temperature=0.0, eos_token_id=None, past=given, streamer=clock)
        answers.append(out.sequences)
        seconds[given is past] = clock.seconds
    assert torch.equal(*answers)
    return seconds[False], seconds[True]


class FirstToken:
    """A streamer that notes when the first new tokens come."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begin, self._puts = time.perf_counter(), 0

    def put(self, value: Tensor) -> None:
        self._puts += 1
        if self._puts == 2:  # the first is the prompt
            self.seconds = time.perf_counter() - self._begin

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
