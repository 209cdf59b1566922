"""Speculative decoding in its plainest form: a chain of drafted tokens, with no cache, batch, tree or kernel.

Algorithm 1 of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding". With P_i the target's
distribution of the i-th new token and Q_i the draft's, one step is:

    1. The draft writes k tokens, one after the other: x_i ~ Q_i.
    2. The target reads all of them in one forward pass, which gives P_1, ..., P_k+1.
    3. From the first to the last, x_i is accepted with probability min(1, P_i(x_i) / Q_i(x_i)).
    4. The first rejection ends the step with a recovered token ~ norm(max(P_i - Q_i, 0)).
       If there was none, the step ends with a bonus token ~ P_k+1.

Every new token x follows P exactly. It is drafted and accepted with probability min(P(x), Q(x)), and it is recovered
with probability max(P(x) - Q(x), 0), because `norm` divides by the probability of a rejection. The sum is P(x).
"""

from typing import Any

import torch
from torch import Generator, Tensor


@torch.no_grad()
def chain_decode(
    target: Any,
    draft: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    draft_length: int = 4,
    temperature: float = 1.0,
    generator: Generator | None = None,
) -> Tensor:
    """Continue a prompt LongTensor[1, T] to LongTensor[1, T + max_new_tokens]; temperature 0 is greedy.

    target, draft: model(ids).logits is [1, T, V]; both models have one vocabulary. draft_length: k.
    """
    text, end = input_ids[0], input_ids.shape[1] + max_new_tokens
    while len(text) < end:
        # Step 1. One of the new tokens is left for step 4.
        drafted, draft_probs = text, []
        for _ in range(min(draft_length, end - len(text) - 1)):
            draft_probs.append(distribution(draft(drafted[None]).logits[0, -1], temperature))
            drafted = torch.cat([drafted, torch.multinomial(draft_probs[-1], 1, generator=generator)])
        # Step 2.
        target_probs = distribution(target(drafted[None]).logits[0, len(text) - 1 :], temperature)  # [k + 1, V]
        # Step 3.
        last_probs = target_probs[-1]  # of the bonus token, unless a drafted token is rejected
        for token, draft_law, target_law in zip(drafted[len(text) :], draft_probs, target_probs, strict=False):
            coin = torch.rand((), generator=generator, device=text.device)  # in [0, 1)
            if coin >= target_law[token] / draft_law[token]:  # rejected
                residual = (target_law - draft_law).clamp(min=0)
                last_probs = residual if residual.any() else target_law  # zeros: the two laws differ by rounding alone
                break
            text = torch.cat([text, token[None]])
        # Step 4. multinomial normalises the residual.
        text = torch.cat([text, torch.multinomial(last_probs, 1, generator=generator)])
    return text[None]


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities [..., V]; at temperature 0 the likeliest token has all of it."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return torch.softmax(logits.float() / temperature, -1)


def main() -> None:
    """Continue a demo prompt and count the target's forward passes: `python -m heavypath.speculative.demo.chain`."""
    from heavypath.speculative.demo import demo_prompts, load_demo_pair

    target, draft, tokenizer = load_demo_pair()
    forwards = []
    target.register_forward_hook(lambda *_: forwards.append(1))
    prompt = tokenizer(demo_prompts()[3], return_tensors="pt").input_ids
    text = chain_decode(target, draft, prompt, max_new_tokens=64, temperature=0.6, generator=Generator().manual_seed(0))
    print(tokenizer.decode(text[0]))
    print(f"\n64 tokens in {len(forwards)} target forwards: {64 / len(forwards):.2f} tokens per forward")


if __name__ == "__main__":
    main()
