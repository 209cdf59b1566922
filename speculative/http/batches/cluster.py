"""Answer a batch file on a Ray cluster: each actor has a decoder, and the driver writes the answers.

Ray restarts an actor whose process or machine has ended, and sends its unanswered lines again. A line that ends actors
again and again gets an error. If the driver ends, a new one continues from the files of answers, as on one machine.
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from heavypath.speculative.http.batches.lines import Line
from heavypath.speculative.http.batches.output import LineAnswer, Output
from heavypath.speculative.http.batches.running import answer_all
from heavypath.speculative.http.batches.worker import Worker

RETRIES = 2  # for a line whose actor has ended: first together with other lines, then alone
logger = logging.getLogger(__name__)


def on_cluster(
    address: str,
    workers: int | None,
    make: Callable[[], Worker],
    lines: Iterable[Line],
    output: Output,
    at_once: int,
    written: Callable[[], object],
) -> None:
    """Answer the lines of a batch file on a Ray cluster, and write the answers in the order of the lines.

    address: address of the cluster, as for `ray.init`
    workers: number of decoders; None for one on each GPU, or on each machine if there are no GPUs
    make:    makes the worker of an actor, in the actor's process
    output:  the files of answers
    at_once: how many lines each worker has in progress at a time
    written: called without arguments after each answer is written

    Raises ImportError without Ray, and ConnectionError if there is no cluster at the address.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"a cluster needs Ray: `pip install '.[ray]'` in a checkout ({error})") from None
    ray.init(address=address, log_to_driver=False)
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        count = workers or gpus or len([node for node in ray.nodes() if node["Alive"]])
        actor: Any = ray.remote(
            num_gpus=1 if gpus else 0,
            max_restarts=-1,
            max_task_retries=RETRIES,
            max_concurrency=at_once,
            scheduling_strategy="SPREAD",
        )(_Actor)
        actors = [actor.remote(make) for _ in range(count)]
        under_way = [0] * count

        async def send(line: Line) -> LineAnswer:
            least = under_way.index(min(under_way))
            under_way[least] += 1
            try:
                reference: Awaitable[LineAnswer] = actors[least].answer.remote(line)
                return await reference
            finally:
                under_way[least] -= 1

        async def all_ready() -> None:  # raises the error of an actor that cannot be started
            for each in actors:
                await each.ready.remote()

        async def answer_ready() -> None:
            await all_ready()
            await answer_all(lines, output, answer, at_once * count, written)

        alone = asyncio.Lock()

        async def answer(line: Line) -> LineAnswer:
            with suppress(ray.exceptions.RayActorError):
                return await send(line)
            async with alone:  # another line in progress may have ended the actor
                try:
                    return await send(line)
                except ray.exceptions.RayActorError as error:
                    await all_ready()
                    logger.exception("line %d was given up", line.number + 1)
                    return LineAnswer(500, {"error": {"message": str(error), "type": "server_error"}})

        asyncio.run(answer_ready())
    finally:
        ray.shutdown()


class _Actor:
    """A `Worker` in its own process on the cluster. make: makes the worker there."""

    def __init__(self, make: Callable[[], Worker]):
        self._worker = make()

    async def ready(self) -> None:
        """Return once the actor has been created."""

    async def answer(self, line: Line) -> LineAnswer:
        """The answer to a line; ends the process if the service has ended."""
        try:
            return await self._worker.answer(line)
        except ConnectionError:
            logger.exception("the service has ended")
            os._exit(1)  # so that Ray restarts it, which it does not do after a regular exit
