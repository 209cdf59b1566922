"""`Worker`: the models, a service and the server's application in one process, to answer lines."""

from pathlib import Path

from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.http.app import create_app, fingerprint_of
from heavypath.speculative.http.batches.lines import Line
from heavypath.speculative.http.batches.output import LineAnswer
from heavypath.speculative.http.batches.running import answer_by
from heavypath.speculative.http.metrics import Metrics
from heavypath.speculative.http.served import Limits, Served
from heavypath.speculative.loading import Pair
from heavypath.speculative.profile import Profile


class Worker:
    """Answers the lines of batch files with a decoder, its service and the server's application in this process.

    pair:       target, draft and tokenizer
    name:       the model's name in answers
    temperature: of lines that have none
    tree_size, verifier: options of the decoder; None for its defaults
    profile:    file of the measurements by `heavypath calibrate`; None for none
    slots:      how many sequences are decoded in a step
    max_tokens: most tokens of a sequence, prompt included
    at_once:    how many lines are in progress at a time
    template:   the chat template; None for the tokenizer's
    seed:       seed of the service

    service: the open service; app: the ASGI application that uses it
    """

    def __init__(
        self,
        pair: Pair,
        name: str,
        temperature: float = 1.0,
        *,
        method: str = "ersd",
        tree_size: int | None = None,
        profile: Path | None = None,
        verifier: str | None = None,
        slots: int = 8,
        max_tokens: int = 2048,
        at_once: int = 32,
        template: str | None = None,
        seed: int = 0,
    ):
        if template is not None:
            pair.tokenizer.chat_template = template
        measured = None if profile is None else Profile.load(profile)
        decoder = SpeculativeDecoder(
            pair.target, pair.draft, method, tree_size=tree_size, profile=measured, verifier=verifier
        )
        choices = 16 * slots
        self.service = decoder.serve(slots=slots, max_tokens=max_tokens, queue=choices + at_once, seed=seed)
        max_tokens = self.service.limits.max_tokens  # the models' positions may lower it
        limits = Limits(max_tokens, choices=choices, body_bytes=1 << 26, seconds=None)
        served = Served(
            service=self.service,
            tokenizer=pair.tokenizer,
            name=name,
            temperature=temperature,
            eos_token_ids=pair.eos_token_ids,
            limits=limits,
            metrics=Metrics(self.service),
        )
        self.app = create_app(served, fingerprint_of(method, seed))

    async def answer(self, line: Line) -> LineAnswer:
        """The answer to a line. Raises ConnectionError if the service has ended."""
        answer = await answer_by(self.app, line)
        if answer.status >= 500 and not self.service.is_open:  # not caused by the line, which must be sent again
            raise ConnectionError(f"the service has ended: {answer.body}")
        return answer

    def close(self) -> None:
        """Cancel all requests and close the service."""
        self.service.close(graceful=False)
