"""What block verification gains over speculative sampling on a chain, without a coin, from the target's own texts.

    python bench/chain_laws.py [--texts 6] [--tokens 160] [--temperature 1] [--length 8] [--json FILE]

The target continues each prompt a few times. The ratios of its probabilities and the draft's along these texts say how
many tokens of a chain are accepted by either (`chains.py`), so both are compared on the very same texts, and
nothing is decoded. "as roots" is the mean over all tokens as roots, which is too much, since fewer steps begin where a
text is easy. The standard error of the gain is a jackknife over the prompts.
"""

import math
from collections.abc import Sequence

import torch
from chains import chain_tokens, length_laws
from common import argument_parser, environment, quiet_demo_pair, token_ids, until_stopped, write_results
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from heavypath.kernels.filtering import Filters, filtered_logprobs
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import DemoPair, demo_prompts


@torch.inference_mode()
def log_ratios(pair: DemoPair, prompt: Tensor, temperature: float, texts: int, tokens: int) -> Tensor:
    """log P - log Q of each token of texts that the target writes behind a prompt, [texts, tokens]."""
    decoder = SpeculativeDecoder(pair.target, None, "autoregressive")
    ids = decoder.generate(
        prompt.expand(texts, -1), max_new_tokens=tokens, temperature=temperature, eos_token_id=None
    ).sequences
    written = ids[:, prompt.shape[1] :, None]
    target, draft = (
        filtered_logprobs(model(ids).logits[:, prompt.shape[1] - 1 : -1].flatten(0, 1), Filters(temperature))
        .view(texts, tokens, -1)
        .gather(2, written)[..., 0]
        for model in (pair.target, pair.draft)
    )
    return target.double() - draft.double()


def gain(mine: Tensor, other: Tensor) -> tuple[float, float]:
    """How many times the other's tokens per forward, less 1, and its error; of [2, prompts], tokens and steps."""
    count = mine.shape[1]

    def ratio(kept: Tensor) -> float:
        ours, theirs = (each[:, kept].sum(1) for each in (mine, other))
        return float(ours[0] / ours[1] * theirs[1] / theirs[0]) - 1

    without = torch.tensor([ratio(torch.arange(count) != left) for left in range(count)])
    return ratio(torch.arange(count)), math.sqrt((count - 1) * float(without.var(correction=0)))


def as_table(rows: Sequence[dict]) -> Table:
    table = Table("T", "chain", "rejection", "block", "gain", "rejection, as roots", "block, as roots")
    for row in rows:
        table.add_row(
            f"{row['temperature']:g}", str(row["length"]), f"{row['rejection']:.3f}", f"{row['block']:.3f}",
            f"{row['gain']:+.1%} ({row['gain_error']:.1%})", f"{row['rejection_as_roots']:.3f}",
            f"{row['block_as_roots']:.3f}",
        )  # fmt: skip
    return table


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--texts", type=int, default=6, help="behind each prompt")
    parser.add_argument("--tokens", type=int, default=160, help="of each text")
    parser.add_argument("--temperature", type=float, action="append", help="default: 0.6 and 1")
    parser.add_argument("--length", type=int, action="append", help="of the chain; default: 2, 4, 8 and 16")
    arguments = parser.parse_args()
    if arguments.miniature:
        arguments.prompts, arguments.texts, arguments.tokens, arguments.length = 2, 1, 8, [2]
    torch.set_num_threads(arguments.threads)
    pair, rows = quiet_demo_pair(), []
    prompts = token_ids(pair.tokenizer, demo_prompts()[: arguments.prompts])
    with until_stopped():
        for temperature in track(arguments.temperature or (0.6, 1.0), "texts", console=Console(stderr=True)):
            texts = [log_ratios(pair, each, temperature, arguments.texts, arguments.tokens) for each in prompts]
            for length in arguments.length or (2, 4, 8, 16):
                by_prompt = [chain_tokens(each, length) for each in texts]
                yields = {name: torch.stack([each[name].sum(1) for each in by_prompt], 1) for name in by_prompt[0]}
                row = {name: float(each[0].sum() / each[1].sum()) for name, each in yields.items()}
                laws = length_laws(torch.cat(texts).unfold(1, length, 1))._asdict()
                row |= {f"{name}_as_roots": float(1 + law.sum(-1).mean()) for name, law in laws.items()}
                row["gain"], row["gain_error"] = gain(yields["block"], yields["rejection"])
                rows.append({"temperature": temperature, "length": length} | row)
    Console(width=110).print(as_table(rows))
    settings = {name: getattr(arguments, name) for name in ("prompts", "texts", "tokens")}
    write_results(arguments.json, environment("cpu") | settings, rows=rows)


if __name__ == "__main__":
    main()
