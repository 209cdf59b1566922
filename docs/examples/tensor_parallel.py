"""Split a target over the processes that torchrun starts; without it the same program decodes in one process.

torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py --models TARGET DRAFT
"""

import argparse
import os

import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig

from heavypath.speculative import SpeculativeDecoder, TextStream, load_demo_pair


def write(piece: str) -> None:
    """Print a piece of a text as it comes; rank 0 alone is given any."""
    print(piece, end="", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="def read_lines(path):")
    parser.add_argument("--models", nargs=2, metavar=("TARGET", "DRAFT"), help="folders, or names at Hugging Face")
    args = parser.parse_args()
    target, draft, tokenizer = load_demo_pair()
    if args.models:
        split = DistributedConfig(tp_plan="auto", tp_size=int(os.environ.get("WORLD_SIZE", "1")))
        target = AutoModelForCausalLM.from_pretrained(args.models[0], distributed_config=split).eval()
        draft = AutoModelForCausalLM.from_pretrained(args.models[1]).eval()  # each rank has all of it
        draft.to(target.device)  # pyright: ignore[reportArgumentType]
        tokenizer = AutoTokenizer.from_pretrained(args.models[0])
    inputs = tokenizer(args.prompt, return_tensors="pt").to(target.device)
    out = SpeculativeDecoder(target, draft).generate(inputs.input_ids, 64, streamer=TextStream(tokenizer, write))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"\n{out.stats}")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
