"""What holds with any draft: texts are those of transformers, of plain sampling, and of each prompt alone."""

import torch
from tiny_models import assert_same_text, transformers_greedy

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.demo import demo_prompts


def assert_a_batch_is_each_alone(decoder):
    """Of prompts of different lengths over seven tokens; texts that end, and steps too."""
    lengths, longest = [1, 5, 2, 9], 9
    prompts = [torch.randint(0, 7, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    padded = torch.stack([torch.cat([torch.zeros(longest - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack([torch.arange(longest) >= longest - length for length in lengths]).long()
    ids = torch.tensor([4, 0, 7, 2])
    options = {"max_new_tokens": 23, "temperature": 0.8, "seed": 5, "eos_token_id": 6, "pad_token_id": 0}
    batch = decoder.generate(padded, attention_mask=mask, sequence_ids=ids, **options)
    for b, prompt in enumerate(prompts):
        alone = decoder.generate(prompt[None], sequence_ids=ids[b : b + 1], **options)
        new = alone.sequences[0, len(prompt) :]
        assert torch.equal(batch.sequences[b, longest : longest + len(new)], new)
        assert (alone.stats.steps, alone.stats.new_tokens) == (batch.stats.steps_of[b], batch.stats.tokens_of[b])


def assert_races_are_plain_sampling(target, draft, prompt, **sampling):
    """The text of ersd is that of the target alone under the same seed."""
    for seed in range(5):
        texts = [
            SpeculativeDecoder(target, each, method)
            .generate(prompt, max_new_tokens=40, seed=seed, **sampling)
            .sequences
            for method, each in (("autoregressive", None), ("ersd", draft))
        ]
        assert torch.equal(*texts)


def assert_greedy_text_is_that_of_transformers(decoders, tokenizer):
    """For 20 shipped prompts of 128 new tokens; all decoders have one target."""
    target = decoders[0].target
    for prompt in demo_prompts()[:20]:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        expected = transformers_greedy(target, ids, 128)
        for decoder in decoders:
            out = decoder.generate(ids, max_new_tokens=128, temperature=0.0, eos_token_id=None)
            assert_same_text(target, out.sequences, expected)
