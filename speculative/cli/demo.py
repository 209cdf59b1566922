"""`heavypath demo`: continue real prompts with the shipped pair, and compare all methods on them."""

from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.compare import print_rows
from heavypath.speculative.cli.progress import progress, starting

if TYPE_CHECKING:
    from torch import Tensor

    from heavypath.speculative.decoder import SpeculativeDecoder
    from heavypath.speculative.loading import Pair


def demo(
    max_new_tokens: options.MaxNewTokens = 64,
    prompts: Annotated[int, typer.Option(min=1, help="How many of the shipped prompts to continue.")] = 3,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    tree_size: options.TreeSize = None,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    seed: options.Seed = 0,
    repeats: options.Repeats = 3,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Continue real prompts with the shipped pair, then compare all methods with transformers."""
    with starting():
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.cli.support import encode, load, say_if_busy
        from heavypath.speculative.comparison import compare
        from heavypath.speculative.decoder import SpeculativeDecoder
        from heavypath.speculative.demo import demo_prompts

    Filters(temperature, top_k, top_p).check()
    texts = demo_prompts()
    if prompts > len(texts):
        raise ValueError(f"--prompts must be at most {len(texts)}, the number of shipped prompts, got {prompts}")
    pair = load(dtype=dtype, device=device, threads=threads)
    inputs = [encode(pair, text) for text in texts[:prompts]]
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if not as_json:
        decoder = SpeculativeDecoder(pair.target, pair.draft, tree_size=tree_size)
        for text, ids in zip(texts, inputs, strict=False):
            _stream_demo_text(decoder, pair, text, ids, {**sampling, "max_new_tokens": max_new_tokens})
    say_if_busy()
    if not as_json:
        typer.echo(f"comparing {len(options.LOSSLESS_METHODS) + 2} ways to decode ...", err=True)
    with progress("comparing the methods", quiet=as_json) as report:
        rows = compare(
            pair.target,
            pair.draft,
            inputs,
            max_new_tokens=max_new_tokens,
            tree_size=tree_size,
            repeats=repeats,
            on_progress=report,
            **sampling,
        )
    settings = {"prompts": prompts, "max_new_tokens": max_new_tokens, "tree_size": tree_size, "repeats": repeats}
    print_rows(rows, settings | sampling, pair.target.device, as_json=as_json)


def _stream_demo_text(decoder: "SpeculativeDecoder", pair: "Pair", text: str, ids: "Tensor", sampling: dict) -> None:
    from heavypath.speculative.cli.texts import show_dimmed
    from heavypath.speculative.output.text_stream import TextStream

    show_dimmed(text)
    stream = TextStream(pair.tokenizer, options.write_now)
    stats = decoder.generate(ids, eos_token_id=pair.eos_token_ids, streamer=stream, **sampling).stats
    counts = f"{stats.new_tokens} tokens, {stats.tokens_per_step:.2f} per target forward"
    show_dimmed(f"\n\n[{decoder.method}: {counts}]\n", end="\n")
