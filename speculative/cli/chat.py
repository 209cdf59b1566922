"""`heavypath chat`: a conversation with a model, in which each turn computes its new tokens alone.

A line of standard input, typed or piped, is a turn. Answers go to standard output, everything else to standard error.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from jinja2 import TemplateError
from transformers import PreTrainedModel

from heavypath.kernels.filtering import Filters
from heavypath.speculative.cli.support import (
    Draft,
    MaxNewTokens,
    Seed,
    Target,
    TopK,
    TopP,
    TreeSize,
    check_choice,
    load,
)
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.loading import Pair
from heavypath.speculative.methods import METHODS
from heavypath.speculative.models.text_cache import TextCache
from heavypath.speculative.output.generation import Generation
from heavypath.speculative.output.text_stream import TextStream
from heavypath.speculative.profile import Profile

HELP = f"""\
/stats        counts and times of the last answer
/method NAME  go on with another method: {", ".join(METHODS)}
/reset        begin a new conversation
/help         this list
/quit         end; Ctrl-D does, too, and Ctrl-C ends an answer"""
# For a tokenizer without a template: an answer continues its question, and a new line begins after it.
PLAIN = "{% for message in messages %}{{ message.content }}{{ '' if message.role == 'user' else '\n' }}{% endfor %}"


def chat(
    target: Target = None,
    draft: Draft = None,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")] = "sequoia",
    system: Annotated[str | None, typer.Option(help="A system message, which begins the conversation.")] = None,
    template: Annotated[
        Path | None, typer.Option(help="A chat template (Jinja, UTF-8) in the place of the tokenizer's own.")
    ] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token; > 0 samples. Default: as the model's generation_config says."),
    ] = None,
    top_k: TopK = None,
    top_p: TopP = None,
    tree_size: TreeSize = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile that `heavypath calibrate` wrote, which chooses the tree.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Chat with a model through its tokenizer's chat template. Lines that begin with / are commands; see /help."""
    Filters(temperature or 0.0, top_k, top_p).check()
    check_choice(method, target, draft)
    own_template = None if template is None else _read(template)
    measured = None if profile is None else Profile.load(profile)
    pair = load(target, draft)
    if own_template is None and pair.tokenizer.chat_template is None:
        own_template = PLAIN
        _say("the tokenizer has no chat template: each answer continues the text of both sides; see --template")

    def decoder_of(method: str) -> SpeculativeDecoder:
        return SpeculativeDecoder(pair.target, pair.draft, method, tree_size=tree_size, profile=measured)

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    conversation = Conversation(pair, own_template, system, decoder_of(method), sampling | {"seed": seed})
    _say(f"{method}; /help lists the commands")
    while (line := _next_line()) is not None:
        if line.startswith("/"):
            if line == "/quit":
                break
            _obey(line, conversation, decoder_of)
        elif line:
            conversation.answer(line)


class Conversation:
    """The messages so far, and what was computed of them.

    options: of `generate`; the seed is that of the first answer, and each answer after it has the next one
    """

    def __init__(
        self, pair: Pair, template: str | None, system: str | None, decoder: SpeculativeDecoder, options: dict[str, Any]
    ):
        self.decoder = decoder
        self.last: Generation | None = None
        self._pair, self._template, self._system, self._options = pair, template, system, options
        self._past: TextCache | None = None  # held, whatever else the decoder writes
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._answers = 0

    def answer(self, text: str) -> None:
        """Answer a message on standard output. A message that cannot be answered is said so, and forgotten."""
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        stream = TextStream(self._pair.tokenizer, lambda piece: pieces.append(piece) or _write(piece))
        try:
            self.last = self._generate(stream)
            self._past = self.last.cache
        except KeyboardInterrupt:
            stream.end()
        except ValueError as error:
            self._messages.pop()
            _say(" ".join(str(error).split()))
            return
        _write("\n")
        self._answers += 1
        self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _generate(self, stream: TextStream) -> Generation:
        tokenizer, models = self._pair.tokenizer, (self._pair.target, self._pair.draft)
        try:
            tokens: Any = tokenizer.apply_chat_template(
                self._messages, chat_template=self._template, add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"the chat template cannot write this conversation: {error}") from error
        texts = [model.config.get_text_config(decoder=True) for model in models if isinstance(model, PreTrainedModel)]
        positions = min(config.max_position_embeddings for config in texts)
        if len(tokens) >= positions:
            raise ValueError(f"the conversation has {len(tokens)} tokens, the models {positions} positions; /reset it")
        options = self._options | {"seed": self._options["seed"] + self._answers}
        options["max_new_tokens"] = min(options["max_new_tokens"], positions - len(tokens))
        return self.decoder.generate(
            torch.tensor([tokens], device=self._pair.target.device),
            eos_token_id=self._pair.eos_token_ids,
            tokenizer=tokenizer,
            streamer=stream,
            past=self._past,
            **options,
        )


def _obey(line: str, conversation: Conversation, decoder_of: Callable[[str], SpeculativeDecoder]) -> None:
    """Do what a line that begins with / says."""
    match line.split():
        case ["/help"]:
            _say(HELP)
        case ["/stats"]:
            _say("no answer yet" if conversation.last is None else str(conversation.last.stats))
        case ["/reset"]:
            conversation.reset()
            _say("a new conversation")
        case ["/method", name]:
            try:
                conversation.decoder = decoder_of(name)
                _say(name)
            except ValueError as error:
                _say(" ".join(str(error).split()))
        case ["/method"]:
            _say(f"{conversation.decoder.method}; others are {', '.join(METHODS)}")
        case _:
            _say(f"there is no command {line!r}; /help lists them")


def _next_line() -> str | None:
    """The next line of standard input; None at its end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
            line.encode()  # standard input may have bytes that are no text
            return line
        except EOFError:
            if sys.stdin.isatty():
                _say("")  # the shell's prompt comes on a line of its own
            return None
        except KeyboardInterrupt:
            _say("\nCtrl-D or /quit ends the conversation")
        except UnicodeError as error:
            raise ValueError(f"standard input is not UTF-8 text: {error}") from error


def _read(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise ValueError(f"the template in {str(template)!r} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise OSError(f"cannot read the template in {str(template)!r}: {error.strerror}") from error


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
