"""`heavypath chat`: a conversation with a model. Each turn computes only its new tokens.

Each line of standard input, typed or piped, is a turn. Answers go to standard output, all else to standard error.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from heavypath.speculative.cli import options
from heavypath.speculative.cli.progress import starting

if TYPE_CHECKING:
    from heavypath.speculative.cli.conversation import Conversation
    from heavypath.speculative.decoder import SpeculativeDecoder

HELP = f"""\
/stats        counts and times of the last answer
/method NAME  continue with another method: {", ".join(options.METHODS)}
/reset        begin a new conversation
/help         this list
/quit         end the chat, as Ctrl-D does; Ctrl-C ends only the current answer"""
# For a tokenizer without a template: an answer continues its question, and ends with a new line.
PLAIN = "{% for message in messages %}{{ message.content }}{{ '' if message.role == 'user' else '\n' }}{% endfor %}"
CODE = """\
This small model was trained only on Python source, and continues code: type `def read_lines(path):`.
An answer ends at a blank line. Use --target and --draft for models that can chat."""
CODE_TEMPERATURE = 0.6  # at 0 such a small model soon repeats itself


def chat(
    target: options.Target = None,
    draft: options.Draft = None,
    method: options.Method = None,
    system: Annotated[str | None, typer.Option(help="A system message, which begins the conversation.")] = None,
    template: options.Template = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0, help="0 takes the likeliest token; > 0 samples. Default: from the model's generation_config."
        ),
    ] = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    tree_size: options.TreeSize = None,
    profile: options.ProfileFile = None,
    device: options.Device = None,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    offline: options.Offline = False,
    seed: options.Seed = 0,
    verbose: options.Verbose = False,
) -> None:
    """Chat with a model through its tokenizer's chat template. Lines that begin with / are commands; see /help.

    Without --target it is the shipped model, which was trained only on Python source: type code, and it continues.
    """
    options.check_method(method)
    with starting():
        from heavypath.kernels.filtering import Filters
        from heavypath.speculative.cli.conversation import Conversation
        from heavypath.speculative.cli.support import choose, load
        from heavypath.speculative.decoder import SpeculativeDecoder
        from heavypath.speculative.profile import Profile

    Filters(temperature or 0.0, top_k, top_p).check()
    own_template = None if template is None else options.read_template(template)
    measured = None if profile is None else Profile.load(profile)
    method, draft = choose(method, target, draft, offline=offline)
    pair = load(target, draft, dtype, device=device, threads=threads, offline=offline)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "max_new_tokens": max_new_tokens}
    code = target is None and own_template is None
    if code:
        own_template = PLAIN
        sampling |= {"temperature": CODE_TEMPERATURE if temperature is None else temperature, "stop_strings": "\n\n"}
        _say(CODE)
    elif own_template is None and pair.tokenizer.chat_template is None:
        own_template = PLAIN
        _say("the tokenizer has no chat template: each answer continues the whole conversation as text; see --template")

    def decoder_of(method: str) -> SpeculativeDecoder:
        return SpeculativeDecoder(pair.target, pair.draft, method, tree_size=tree_size, profile=measured)

    conversation = Conversation(pair, own_template, system, decoder_of(method), sampling | {"seed": seed})
    _say(f"{method}; /help lists the commands")
    while (line := _next_line()) is not None:
        line = line.rstrip() if code else line.strip()  # code may be indented
        if line.startswith("/"):
            if line == "/quit":
                break
            _obey(line, conversation, decoder_of)
        elif line:
            conversation.answer(line)


def _obey(line: str, conversation: "Conversation", decoder_of: "Callable[[str], SpeculativeDecoder]") -> None:
    """Run a command, a line that begins with /."""
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
            _say(f"{conversation.decoder.method}; others are {', '.join(options.METHODS)}")
        case _:
            _say(f"there is no command {line!r}; /help lists them")


def _next_line() -> str | None:
    """Read the next line of standard input; None at its end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
            line.encode()  # fails for bytes that are not text
            return line
        except EOFError:
            if sys.stdin.isatty():
                _say("")  # so that the shell's prompt begins on a new line
            return None
        except KeyboardInterrupt:
            _say("\nCtrl-D or /quit ends the conversation")
        except UnicodeError as error:
            raise ValueError(f"standard input is not UTF-8 text: {error}") from error


def _say(text: str) -> None:
    typer.echo(text, err=True)
