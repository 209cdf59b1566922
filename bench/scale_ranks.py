"""A target split over processes of this machine: the forward pass, and what the ranks tell each other in a step.

    python bench/scale.py ranks [--ranks 1 2 4] [--rank-nodes 256] [--rank-threads 1]

The shipped pair's target is made larger without a change of what it computes (`enlarging`), 230M parameters in fp32
unless --rank-layers and --rank-width say otherwise, and split by transformers' own plan. Its pass over a tree of so
many nodes behind a prompt is compute-bound on a CPU. For each number of ranks, in rounds of their own processes:

forward     median milliseconds of a pass of the target over the tree, of the slowest rank
cpu         milliseconds of CPU that a rank takes for it: what is left of a busy machine's noise
waiting     share of a step that a rank spends in collectives, which is waiting for the others, too
collectives, bytes   of a step with a whole draft, and of its rank's tensors in them
step        milliseconds of a step of `sequoia` with so many nodes, and tokens that it brings

`speedup` is forward of one process over that of ranks. Several ranks on fewer cores say nothing about speed.

With --device cuda each rank has a GPU of its own, weights are fp16, collectives are NCCL's, and steps are CUDA graphs,
within which collectives are not counted.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import environment, quiet_demo_pair, quieten, random_tree, show, write_results
from enlarging import Widths, enlarged
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.decoding.step import Stepped, StepPlan
from heavypath.speculative.decoding.workspace import Workspace
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.models.forward import Forward, TreeMask
from heavypath.speculative.models.forward_of import forward_of
from heavypath.speculative.ranks.group import Ranks
from heavypath.speculative.trees.planning import sequoia_tree
from heavypath.speculative.visits import Watched

ACCEPTANCE = [0.6, 0.15, 0.08, 0.05]  # of children, to plan a tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks: how many processes")
    parser.add_argument("--rank-nodes", type=int, default=256, help="ranks: of a tree")
    parser.add_argument("--rank-layers", type=int, default=18, help="ranks: of the target, at least 8")
    parser.add_argument("--rank-width", type=int, default=1024, help="ranks: hidden channels, a multiple of 64")
    parser.add_argument("--rank-threads", type=int, default=1, help="ranks: of each process")
    parser.add_argument("--rank-passes", type=int, default=7, help="ranks: timed in each process")


def run(arguments: argparse.Namespace) -> None:
    """Measure every number of ranks, each in processes of its own."""
    if arguments.device == "cuda" and torch.cuda.device_count() < max(arguments.ranks):
        raise SystemExit(f"{max(arguments.ranks)} ranks need as many GPUs, got {torch.cuda.device_count()}")
    if arguments.miniature:
        arguments.ranks, arguments.rank_nodes, arguments.rank_passes = [1, 2], 8, 2
        arguments.rank_layers, arguments.rank_width = 8, 384
    target, draft, tokenizer = quiet_demo_pair()
    assert isinstance(target, LlamaForCausalLM)
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        inner = 8 * arguments.rank_width // 3 // 64 * 64 + 64
        widths = Widths(arguments.rank_layers, arguments.rank_width, arguments.rank_width // 32, inner)
        large = enlarged(target, widths, tokenizer.vocab_size)
        parameters = sum(weight.numel() for weight in large.parameters())
        for name, model in (("target", large), ("draft", draft)):
            model.save_pretrained(Path(folder, name))
        tokenizer.save_pretrained(folder)
        del large
        for count in arguments.ranks:
            rows.append(_in_processes(count, folder, arguments))
            rows[-1]["speedup"] = rows[0]["forward_ms"] / rows[-1]["forward_ms"] if rows[0]["ranks"] == 1 else None
            facts = {"parameters": parameters, "nodes": arguments.rank_nodes, "threads": arguments.rank_threads}
            machine = environment(arguments.device) | {"load": os.getloadavg()[0]}
            write_results(arguments.json, machine, **facts, rows=rows)
    show(rows, title=f"{parameters / 1e6:.0f}M parameters, {arguments.rank_nodes} nodes")


def _in_processes(count: int, folder: str, arguments: argparse.Namespace) -> dict:
    """The row of so many ranks."""
    command = [sys.executable, __file__, folder, str(arguments.rank_nodes), str(arguments.rank_passes)]
    command.append(arguments.device)
    beginning = {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": str(arguments.rank_threads)}
    processes = [
        subprocess.Popen(
            command, env=os.environ | beginning | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE
        )
        for rank in range(count)
    ]
    told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a process of {count} has failed")
    every = [json.loads(line) for line in told]
    slowest = {name: max(each[name] for each in every) for name in ("forward_ms", "cpu_ms", "step_ms", "waiting")}
    return {"ranks": count} | every[0] | slowest


class Meter(Watched):
    """Counts collectives within steps, their bytes, and the seconds in them."""

    def __init__(self, decoder: SpeculativeDecoder):
        super().__init__(decoder)
        self._steps, self._in_step = 0, False
        self.calls, self.bytes, self.waiting, self.seconds = 0, 0, 0.0, 0.0
        for name in ("add", "joined", "largest"):
            self._watch(name)

    def _watch(self, name: str) -> None:
        done = getattr(Ranks, name)

        def counted(ranks: Ranks, tensor: Tensor, *rest: int) -> Tensor:
            begin = time.perf_counter()
            result = done(ranks, tensor, *rest)
            if self._in_step:
                self.waiting += time.perf_counter() - begin
                self.calls, self.bytes = self.calls + 1, self.bytes + tensor.nbytes
            return result

        setattr(Ranks, name, counted)

    def run(self, plan: StepPlan, workspace: Workspace, **options: Any) -> Stepped:
        begin, self._in_step = time.perf_counter(), True
        stepped = self.runner.run(plan, workspace, **options)
        self.seconds, self._in_step, self._steps = self.seconds + time.perf_counter() - begin, False, self._steps + 1
        return stepped

    def of_a_step(self) -> dict:
        return {
            "step_ms": 1e3 * self.seconds / self._steps,
            "waiting": self.waiting / self.seconds,
            "collectives": self.calls / self._steps,
            "kilobytes": self.bytes / self._steps / 1e3,
        }


def timed_pass(forward: Forward, prompt: Tensor, nodes: int, passes: int) -> dict:
    """Milliseconds of a pass over a random tree behind a prompt, by the wall clock and of this process's CPU."""
    tree, length, device = random_tree(nodes).reordered("heavy_path")[0], prompt.shape[1], prompt.device
    tokens = torch.arange(nodes, device=device)[None] % forward.vocab_size
    lengths, rows = torch.tensor([length], device=device), length + torch.arange(nodes, device=device)[None]
    positions = length + tree.depths[None].to(device)
    mask = TreeMask(prefix_length=lengths, visible_rows=length + nodes, subtree_end=tree.subtree_end.to(device))
    cache = forward.new_cache(1, length + nodes)
    forward.prefill(prompt, cache)
    wall, cpu = [], []
    for _ in range(passes + 1):
        if forward.ranks is not None:
            dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        forward(tokens, positions, rows, cache, mask)
        if device.type == "cuda":
            torch.cuda.synchronize()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
    return {"forward_ms": 1e3 * median(wall[1:]), "cpu_ms": 1e3 * median(cpu[1:])}


def _rank(folder: str, nodes: int, passes: int, kind: str) -> dict:
    """What one of the processes measures."""
    count, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device, dtype = torch.device(kind), torch.float32
    if kind == "cuda":
        device, dtype = torch.device(kind, rank), torch.float16
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, f"file://{folder}/store-{count}", world_size=count, rank=rank)
    quieten()
    split = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=count)} if count > 1 else {}
    target = AutoModelForCausalLM.from_pretrained(Path(folder, "target"), dtype=dtype, **split).eval().to(device)
    draft = AutoModelForCausalLM.from_pretrained(Path(folder, "draft"), dtype=dtype).eval().to(device)
    prompt = AutoTokenizer.from_pretrained(folder)(demo_prompts()[0], return_tensors="pt").input_ids[:, :128].to(device)
    with torch.inference_mode():
        found = timed_pass(forward_of(target, "target"), prompt, nodes, passes)
    decoder = SpeculativeDecoder(target, draft, "sequoia", tree=sequoia_tree(ACCEPTANCE, nodes, max_depth=8))
    meter = Meter(decoder)
    stats = decoder.generate(prompt, 32, eos_token_id=None).stats
    found |= meter.of_a_step() | {"tokens": stats.tokens_per_step}
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(_rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
