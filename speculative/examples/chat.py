"""Chat with a model through its tokenizer's chat template; an empty line ends it. The shipped pair continues Python."""

import argparse
from contextlib import suppress
from functools import partial

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from heavypath.speculative import SpeculativeDecoder, TextStream, load_demo_pair

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of one answer")
    parser.add_argument("--temperature", type=float, default=0.6)
    args = parser.parse_args()

    target, draft, tokenizer = load_demo_pair(device=args.device)
    tokenizer.chat_template = "{{ messages | map(attribute='content') | join('\n') }}"  # the shipped pair has none
    if args.models:
        target, draft = (AutoModelForCausalLM.from_pretrained(name).to(args.device) for name in args.models)
        tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    eos = target.generation_config.eos_token_id  # one token or several: chat models have one that ends a turn
    decoder, streamer = SpeculativeDecoder(target, draft), TextStream(tokenizer, partial(print, end="", flush=True))
    options = {"temperature": args.temperature, "eos_token_id": tokenizer.eos_token_id if eos is None else eos}
    chat = []
    with suppress(EOFError, KeyboardInterrupt):
        while question := input("> "):
            chat.append({"role": "user", "content": question})
            tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            prompt = torch.tensor([tokens], device=args.device)
            out = decoder.generate(prompt, args.max_new_tokens, seed=len(chat), streamer=streamer, **options)
            answer = tokenizer.decode(out.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
            chat.append({"role": "assistant", "content": answer})
            print()
