"""Requests that come while others are decoded, in asyncio: each has its own sampling, and is shown as it grows."""

import argparse
import asyncio

from heavypath.speculative import SpeculativeDecoder, load_demo_pair
from heavypath.speculative.serving import Service

PROMPTS = ["def read_lines(path):", "class Stack:\n    def push(self, item):", "import os\n\ndef find("]


async def answer(service: Service, tokenizer, number: int, prompt: str) -> None:
    """Send a request, a little after the one before, and print its text as it comes."""
    await asyncio.sleep(0.02 * number)
    ids = tokenizer(prompt).input_ids
    completion = service.submit(ids, max_new_tokens=48, temperature=0.3 * number, seed=number, deadline=60)
    async for tokens in completion:
        print(f"[{number}] {tokenizer.decode(tokens)!r}", flush=True)
    done = await completion
    print(f"[{number}] {done.reason}: {len(done.tokens)} tokens in {done.steps} steps, {done.seconds:.2f} s")


async def answer_all(service: Service, tokenizer, prompts: list[str]) -> None:
    """Answer all prompts side by side."""
    await asyncio.gather(*(answer(service, tokenizer, number, prompt) for number, prompt in enumerate(prompts)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    target, draft, tokenizer = load_demo_pair(device=args.device)
    with SpeculativeDecoder(target, draft, method="ersd").serve(slots=2, max_tokens=512) as service:
        asyncio.run(answer_all(service, tokenizer, args.prompts))
        print(service.stats())
