"""The part "device" of scale.py: a target in the host's memory, streamed to a GPU, by trees of all sizes.

The target is the shipped one, enlarged without a change of what it computes (`enlarging`), in bfloat16 and with as many
layers as make it --gpu-gigabytes large. Of that --gpu-memory may lie on the GPU; the other layers are copied for each
pass, from pinned memory or, in the last rows, from disk. Prompts are Python, the draft is the shipped one. One process
does all in one run, in this order:

raw         1 GB of pinned memory copied to the GPU again and again, by one stream: before and behind each group of rows
accelerate  transformers' generate, with accelerate copying each weight when its module is called
generate    transformers' generate through the stream
1, 16, ...  the decoder with trees of so many nodes, whose steps are CUDA graphs, at temperatures 0 and 0.6; 1 is plain
            decoding
disk        the same greedy with --gpu-host-memory of pinned memory, the other layers read from disk in each pass

s/token     seconds for each new token behind the prompt; x plain: that of tree 1 in the same regime over it
tok/step    tokens for each pass of the target
GB/s        bytes copied, or read from disk, over the seconds of the whole call; of raw: that over the raw rate
waited      share of the call in which the GPU waited for weights, where that is known: not within graphs
"""

import argparse
import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, until_stopped
from scale_stream import BESIDE, Rows, write_target
from transformers import AutoModelForCausalLM

from heavypath.speculative import SpeculativeDecoder, load_streamed
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.models.layer_weights import stream_of
from heavypath.speculative.streaming.host_layers import Pinned

RAW = 1 << 30  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part, beside those of the part "stream" that count for it, too."""
    parser.add_argument("--gpu-gigabytes", type=float, default=12, help="device: size of the target")
    parser.add_argument("--gpu-memory", default="4G", help="device: what its weights may take on the GPU")
    parser.add_argument("--gpu-host-memory", default="4G", help="device: of pinned memory, in the last rows")
    parser.add_argument("--gpu-width", type=int, default=4096, help="device: hidden channels, a multiple of 64")


def run(arguments: argparse.Namespace) -> None:
    """Measure all rows, print them, and write them after each."""
    if DEVICE != "cuda":
        raise SystemExit(
            "the part device needs a CUDA GPU; "
            "PYTHONPATH=tests/support:tests/support/stand_in plays one, for --miniature"
        )
    if arguments.miniature:
        arguments.gpu_gigabytes, arguments.gpu_memory, arguments.gpu_host_memory = 0.1, "60M", "35M"
        arguments.gpu_width, arguments.nodes, arguments.new_tokens = 384, [1, 4], 3
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, until_stopped():
        Bench(arguments, Path(folder)).run()


class Bench(Rows):
    """The rows of this part."""

    SETTINGS = ("gpu_gigabytes", "gpu_memory", "gpu_host_memory", "gpu_width")

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        super().__init__(arguments, DEVICE, 8 if arguments.miniature else 48)
        self.folder = folder / "target"
        dtype = torch.float32 if arguments.miniature else torch.bfloat16  # of a GPU that is played 16 bits are wrong
        write_target(self.folder, self.small, arguments.gpu_gigabytes * 1e9, arguments.gpu_width, dtype)
        self.draft = self.draft.to(DEVICE, dtype)
        self.rate = 0.0

    def run(self) -> None:
        """All rows."""
        given = self.given
        self.raw()
        self.of_accelerate()
        model = load_streamed(self.folder, given.gpu_memory, device=DEVICE)
        stream: Any = stream_of(model)
        self.add("memory", stream=stream.nbytes, pinned=stream.host.nbytes)
        self.of_generate("generate", model, 8)
        for temperature in (0.0,) if given.miniature else (0.0, 0.6):
            self.of_trees("pinned", model, temperature)
        stream.close()
        del model, stream
        gc.collect()
        self.raw()
        model = load_streamed(self.folder, given.gpu_memory, device=DEVICE, host_memory=given.gpu_host_memory)
        self.of_trees("disk", model, 0.0)
        stream_of(model).close()
        shutil.rmtree(self.folder)

    def raw(self) -> None:
        """Copy pinned memory, as nothing else does; bytes a second."""
        nbytes, pinned = RAW // 1000 if self.given.miniature else RAW, Pinned(torch.device(DEVICE))
        source, target = pinned.memory(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)
        target.copy_(source, non_blocking=True)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(8):
            target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        pinned.unpin()
        self.rate = 8e3 * nbytes / begin.elapsed_time(end)
        self.add("raw", bandwidth=self.rate)

    def of_accelerate(self) -> None:
        """transformers' generate by accelerate's hooks, with as many layers on the GPU as the stream has there."""
        model = load_streamed(self.folder, self.given.gpu_memory, device=DEVICE)
        stream: Any = stream_of(model)
        here = model.config.num_hidden_layers - stream.layers
        layers = {f"model.layers.{number}": f"{DEVICE}:0" if number < here else "cpu"
                  for number in range(model.config.num_hidden_layers)}  # fmt: skip
        stream.close()
        del model, stream
        gc.collect()
        places = dict.fromkeys(BESIDE, f"{DEVICE}:0") | layers
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype="auto", device_map=places).eval()
        self.of_generate("accelerate", model, 8)

    def before(self, decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
        if not self.given.miniature:  # it compiles kernels and captures graphs
            decoder.generate(self.prompts[0], min(self.given.new_tokens, 8), **options)

    def read(self, regime: str, every: list[Statistics]) -> dict[str, float | None]:
        counts = [each.streaming for each in every if each.streaming is not None]
        whole = sum(each.total_seconds for each in every)
        bandwidth = sum(each.bytes_read for each in counts) / whole
        known = not any(each.untimed for each in counts)
        return {
            "bandwidth": bandwidth,
            "of_raw": bandwidth / self.rate if regime == "pinned" else None,
            "waited": sum(each.waiting for each in counts) / whole if known else None,
        }
