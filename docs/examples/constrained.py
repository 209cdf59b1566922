"""Say what the text may be: JSON of a schema, a pattern, or a rule of your own in a few lines of PyTorch."""

import argparse
import json

import torch

from heavypath.speculative import Grammar, SpeculativeDecoder, load_demo_pair

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 16}, "size": {"type": "integer", "maximum": 999}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def no_token_twice(input_ids, scores):
    """A logits processor: no token of a text LongTensor[1, T] again."""
    return scores.scatter(1, input_ids, -torch.inf)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="config = ")
    parser.add_argument("--method", default="sequoia")
    args = parser.parse_args()
    target, draft, tokenizer = load_demo_pair()
    decoder, inputs = SpeculativeDecoder(target, draft, args.method), tokenizer(args.prompt, return_tensors="pt")
    for name, processor in {
        "schema": Grammar.json_schema(json.dumps(SCHEMA), tokenizer, whitespace=False),
        "pattern": Grammar.regex("[a-z]+\\.py(, [a-z]+\\.py){2}", tokenizer),
        "rule": no_token_twice,
    }.items():
        out = decoder.generate(**inputs, max_new_tokens=48, eos_token_id=0, logits_processor=[processor])
        text = tokenizer.decode(out.sequences[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
        print(f"{name}: {text!r}, {out.stats.tokens_per_step:.2f} tokens per step")
