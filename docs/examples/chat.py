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
    # The shipped pair has no template; it continues what is written.
    tokenizer.chat_template = "{% for each in messages %}{{ each.content + '\n' * (loop.index % 2 == 0) }}{% endfor %}"
    if args.models:
        target, draft = (AutoModelForCausalLM.from_pretrained(name).to(args.device) for name in args.models)
        tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    decoder, streamer = SpeculativeDecoder(target, draft), TextStream(tokenizer, partial(print, end="", flush=True))
    chat, past = [], None
    with suppress(EOFError, KeyboardInterrupt):
        while question := input("> "):
            chat.append({"role": "user", "content": question})
            tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            prompt = torch.tensor([tokens], device=args.device)
            options = {"temperature": args.temperature, "seed": len(chat), "streamer": streamer}
            out = decoder.generate(prompt, args.max_new_tokens, past=past, **options)
            past = out.cache  # so that the next turn computes its new tokens alone
            answer = tokenizer.decode(out.sequences[0, prompt.shape[1] :], skip_special_tokens=True)
            chat.append({"role": "assistant", "content": answer})
            print()
