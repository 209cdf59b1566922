"""`Conversation`: the state of a chat in a terminal."""

from typing import Any

import torch
import typer
from jinja2 import TemplateError

from heavypath.speculative.cli.options import write_now
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.http.reasoning import ReasoningReader, reasoning_of, state_after
from heavypath.speculative.loading import Pair
from heavypath.speculative.models.text_cache import TextCache
from heavypath.speculative.output.generation import Generation
from heavypath.speculative.output.text_stream import TextStream

PROMPT_END = 32  # how many of the prompt's last tokens are searched for an opened thinking marker


class Conversation:
    """The messages so far, and the cached rows of the last answer.

    template: the chat template; None for the tokenizer's; system: the system message, if any
    options: options of `generate`; the seed is for the first answer, and each further answer adds 1
    """

    def __init__(
        self, pair: Pair, template: str | None, system: str | None, decoder: SpeculativeDecoder, options: dict[str, Any]
    ):
        self.decoder = decoder
        self.last: Generation | None = None
        self._pair = pair
        self._template = template
        self._system = system
        self._options = options
        self._past: TextCache | None = None  # kept alive here, since the decoder only keeps its latest caches
        self._prompt_end = ""
        self.reset()

    def reset(self) -> None:
        """Forget all messages except the system message."""
        self._messages: list[dict[str, str]] = (
            [] if self._system is None else [{"role": "system", "content": self._system}]
        )
        self._answers = 0

    def answer(self, text: str) -> None:
        """Answer a message on standard output.

        If it cannot be answered, the error is printed and the message forgotten.
        """
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        stream = TextStream(self._pair.tokenizer, lambda piece: pieces.append(piece) or write_now(piece))
        try:
            self.last = self._generate(stream)
            self._past = self.last.cache
        except KeyboardInterrupt:
            stream.end()
        except ValueError as error:
            self._messages.pop()
            typer.echo(" ".join(str(error).split()), err=True)
            return
        write_now("\n")
        self._answers += 1
        self._messages.append(self._message("".join(pieces)))

    def _message(self, text: str) -> dict[str, str]:
        """An answer in the format of chat templates, with thinking separated if the template supports it."""
        form = reasoning_of(self._template or str(self._pair.tokenizer.get_chat_template()))
        reader = ReasoningReader(form, is_open=None if form is None else state_after(self._prompt_end, form))
        parts = reader.add(text), reader.end()
        thought, said = ("".join(each) for each in zip(*parts, strict=True))
        message = {"role": "assistant", "content": said}
        return message | {"reasoning_content": thought} if thought else message

    def _generate(self, stream: TextStream) -> Generation:
        tokenizer = self._pair.tokenizer
        target = self._pair.target
        try:
            tokens: Any = tokenizer.apply_chat_template(
                self._messages, chat_template=self._template, add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"the chat template cannot write this conversation: {error}") from error
        config: Any = target.config.get_text_config(decoder=True)
        positions = config.max_position_embeddings
        if len(tokens) > positions:
            raise ValueError(f"the conversation has {len(tokens)} tokens, the model {positions} positions; /reset it")
        self._prompt_end = str(tokenizer.decode(tokens[-PROMPT_END:], clean_up_tokenization_spaces=False))
        options = self._options | {"seed": self._options["seed"] + self._answers}
        options["max_new_tokens"] = min(options["max_new_tokens"], positions - len(tokens) + 1)
        return self.decoder.generate(
            torch.tensor([tokens], device=self._pair.target.device),
            eos_token_id=self._pair.eos_token_ids,
            tokenizer=tokenizer,
            streamer=stream,
            past=self._past,
            **options,
        )
