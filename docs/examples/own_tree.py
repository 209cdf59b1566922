"""Decode with a tree of your own, and compare the tokens per step with what is expected of it."""

import argparse

from transformers import AutoModelForCausalLM, AutoTokenizer

from heavypath.speculative import SpeculativeDecoder, TokenTree, expected_tokens, load_demo_pair

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def read_lines(path):")
    parser.add_argument("--branching", type=int, nargs="+", default=[3, 2, 1], help="children of each node, by level")
    parser.add_argument("--parents", type=int, nargs="+", help="or the parent of each node 1, 2, ...; 0 is the root")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.57, 0.12, 0.06], metavar="P",
                        help="probability that child 1, 2, ... is accepted; default: the shipped pair's")  # fmt: skip
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()

    tree = TokenTree([-1, *args.parents]) if args.parents else TokenTree.from_branching(args.branching)
    print(tree)  # node 0 is the last token of the text; siblings are drafted from top to bottom
    print(f"expected: {expected_tokens(tree, args.acceptance):.2f} tokens per step")

    target, draft, tokenizer = load_demo_pair(device=args.device)
    if args.models:
        target, draft = (AutoModelForCausalLM.from_pretrained(name).to(args.device) for name in args.models)
        tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    prompt = tokenizer(args.prompt, return_tensors="pt").input_ids.to(args.device)
    out = SpeculativeDecoder(target, draft, "sequoia", tree=tree).generate(prompt, temperature=0.6)
    print(f"decoded:  {out.stats.tokens_per_step:.2f} tokens per step")
    print("accepted:", " ".join(f"{share:.2f}" for share in out.stats.acceptance_by_rank), "of the children, by rank")
    print(tokenizer.decode(out.sequences[0]))
