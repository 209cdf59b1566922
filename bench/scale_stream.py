"""The part "stream" of scale.py: a target on disk, by trees of all sizes, beside accelerate's offloading.

The target is the shipped one, enlarged without a change of what it computes (`enlarging`), with as many further layers
as make it --gigabytes large; they are read and multiplied like any other. It is written to a temporary folder, which
goes at the end. Prompts are Python, the draft is the shipped one. One process does all in one run, in this order:

raw         the files read by as many threads in pieces of the same size, past the page cache: before and behind each
            row. A row's "of raw" is its bandwidth over the mean of its two raw ones
accelerate  transformers' generate, with accelerate bringing each weight: the first pass, and later ones, which are
            "warm" as far as the files fit into the page cache. What is there accelerate maps, without a copy:
            so where that is large, --limit makes it as small as --memory is
generate    transformers' generate through the stream
1, 16, ...  the decoder with trees of so many nodes, by the stream; 1 is plain decoding

Then the same for a smaller target with reads slowed down to --rate, which is the regime of a GPU that streams from host
memory: there a step is all reading, and what a tree costs to compute does not matter.

s/token     seconds for each new token behind the prompt; x plain: that of tree 1 in the same regime over it
tok/step    tokens for each pass of the target
waited      share of the whole call in which the target waited for weights
--limit     puts the process, once the target is written, into a control group of its own that has so much memory, the
            page cache included: what a machine has whose memory the target does not fit into
taken       anonymous memory of the process beyond what it had before the target was loaded, after two tokens; caches
            and activations of larger trees come later
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import (
    Row,
    clock_of,
    environment,
    quiet_demo_pair,
    timed,
    timed_behind_first,
    token_ids,
    until_stopped,
    write_results,
)
from enlarging import Widths, enlarged
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.demo import demo_prompts
from heavypath.speculative.models.layer_weights import stream_of
from heavypath.speculative.streaming.file import BLOCK, WeightFile
from heavypath.speculative.streaming.layout import CHUNK, aligned_memory
from heavypath.speculative.streaming.load import load_streamed
from heavypath.speculative.streaming.memory import bytes_of
from heavypath.speculative.streaming.source import places_of_folder
from heavypath.speculative.streaming.stream import READERS

NODES = (1, 16, 64, 256, 768)
BESIDE = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this part."""
    parser.add_argument("--gigabytes", type=float, default=8, help="stream: size of the target; 0: none")
    parser.add_argument("--memory", default="2G", help="stream: what its weights may take")
    parser.add_argument("--limit", help="stream: of all memory, the page cache included, such as 3G; needs root")
    parser.add_argument("--width", type=int, default=2048, help="stream: hidden channels, a multiple of 64")
    parser.add_argument("--slow-gigabytes", type=float, default=0.64, help="stream: size where reads are slow; 0: none")
    parser.add_argument("--slow-memory", default="0.2G", help="stream: what weights may take there")
    parser.add_argument("--slow-width", type=int, default=1024, help="stream: hidden channels there")
    parser.add_argument("--rate", type=float, default=100e6, help="stream: bytes a second where reads are slow")
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="stream: sizes of trees")
    parser.add_argument("--new-tokens", type=int, default=24, help="stream: of a text")
    parser.add_argument("--texts", type=int, default=1, help="stream: for each row")
    parser.add_argument("--folder", type=Path, help="stream: where the targets are written (default: a temporary one)")


def run(arguments: argparse.Namespace) -> None:
    """Measure all rows, print them, and write them after each."""
    if arguments.miniature:
        arguments.gigabytes, arguments.memory, arguments.width = 0.2, "60M", 384
        arguments.slow_gigabytes, arguments.slow_memory, arguments.slow_width = 0.1, "50M", 384
        arguments.nodes, arguments.new_tokens = [1, 16], 4
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, until_stopped():
        Bench(arguments, Path(folder)).run()


class Rows:
    """The rows of this part or of "device", which are printed and written one by one, and what both time alike."""

    SETTINGS: tuple[str, ...] = ()  # of the command line, for the file

    def __init__(self, arguments: argparse.Namespace, device: str, length: int):
        self.given, self.device, self.clock = arguments, device, clock_of(device)
        self.small, self.draft, tokenizer = quiet_demo_pair()
        texts = demo_prompts()[: arguments.texts]
        self.prompts = [ids[:, :length] for ids in token_ids(tokenizer, texts, device)]
        self.rows: list[Row] = []

    def add(self, way: str, **figures: Any) -> None:
        """Print a row, and write all."""
        self.rows.append({"way": way, **{name: value for name, value in figures.items() if value is not None}})
        print(shown(self.rows[-1]), flush=True)
        facts = environment(self.device, self.given, *self.SETTINGS) | {"load": os.getloadavg()[0]}
        write_results(self.given.json, facts, rows=self.rows)

    def of_generate(self, way: str, model: LlamaForCausalLM, most: int, **figures: Any) -> None:
        """transformers' greedy generate: of few tokens, each of which is a pass over the weights."""
        count = min(most, self.given.new_tokens)

        def generate(new: int) -> Tensor:
            return model.generate(self.prompts[0], max_new_tokens=new, min_new_tokens=new, do_sample=False)

        seconds, _ = timed_behind_first(generate, count + 1, self.clock)
        self.add(way, seconds_per_token=seconds / count, tokens_per_step=1.0, **figures)

    def of_trees(self, regime: str, model: LlamaForCausalLM, temperature: float) -> None:
        """The decoder with trees of all sizes."""
        plain, options = None, {"temperature": temperature, "eos_token_id": None}
        for nodes in self.given.nodes:
            drafting = {"draft": self.draft, "method": "sequoia", "tree_size": nodes}
            decoder = SpeculativeDecoder(model, **drafting if nodes > 1 else {"method": "autoregressive"})
            self.before(decoder, options)
            new = self.given.new_tokens if nodes > 1 or self.device == "cuda" else min(self.given.new_tokens, 8)
            every = [decoder.generate(ids, new, **options).stats for ids in self.prompts]
            steps, tokens = sum(stats.steps for stats in every), sum(stats.new_tokens for stats in every)
            behind = sum(stats.total_seconds - stats.seconds["prefill"] for stats in every)
            plain = behind / tokens if nodes == 1 else plain
            self.add(
                f"{regime}, T={temperature:g}, {nodes} nodes", seconds_per_token=behind / tokens,
                tokens_per_step=tokens / steps, seconds_per_step=behind / steps,
                times_plain=None if plain is None else plain * tokens / behind, **self.read(regime, every),
            )  # fmt: skip

    def before(self, decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
        """What comes before a row of trees."""

    def read(self, regime: str, every: list[Statistics]) -> dict[str, float | None]:
        """Figures of what was read in some generations."""
        raise NotImplementedError


class Bench(Rows):
    """The rows of this part."""

    SETTINGS = ("gigabytes", "memory", "limit", "width", "slow_gigabytes", "slow_memory", "slow_width", "rate")

    def __init__(self, arguments: argparse.Namespace, folder: Path):
        super().__init__(arguments, "cpu", 48)
        self.folder = folder
        self.source: Path | None = None  # whose raw rate is measured around each row
        self.raws: list[float] = []

    def run(self) -> None:
        if self.given.gigabytes:
            self.at_full_speed(self.folder / "fast")
            gc.collect()
        if self.given.slow_gigabytes:
            self.slowed(self.folder / "slow")

    def at_full_speed(self, fast: Path) -> None:
        """The large target, at the disk's own speed."""
        given = self.given
        write_target(fast, self.small, given.gigabytes * 1e9, given.width)
        with memory_limited(given.limit):
            self.source = fast
            self.raw()
            self.of_accelerate(fast)
            model = self.load(fast, given.memory)
            self.raw()
            before = stream_of(model).counts()
            self.of_generate("generate", model, 4)
            bandwidth = stream_of(model).counts().since(before).bandwidth
            self.add("generate, read", bandwidth=bandwidth, of_raw=bandwidth / self.around())
            self.of_trees("full speed", model, 0.0)
            stream_of(model).close()
        self.source = None
        shutil.rmtree(fast)

    def slowed(self, slow: Path) -> None:
        """The small target, with reads slowed down."""
        given = self.given
        write_target(slow, self.small, given.slow_gigabytes * 1e9, given.slow_width)
        model = self.load(slow, given.slow_memory)
        stream_of(model).slots.read = Slowed(given.rate)
        for temperature in (0.0, 0.6):
            self.of_trees(f"{given.rate / 1e6:.0f} MB/s", model, temperature)
        stream_of(model).close()
        shutil.rmtree(slow)

    def load(self, folder: Path, memory: str) -> LlamaForCausalLM:
        """A streamed target, and what it takes once it has been run."""
        gc.collect()
        before = anonymous_memory()
        model = load_streamed(folder, memory)
        model.generate(self.prompts[0], max_new_tokens=2, do_sample=False)
        taken, asked = anonymous_memory() - before, bytes_of(memory)
        self.add("memory", taken=taken, stream=stream_of(model).nbytes, asked=asked, of_asked=taken / asked)
        return model

    def raw(self) -> None:
        """Read all files past the page cache, at most 4 GB of them; bytes a second."""
        if self.source is not None:
            forget(self.source)
            self.raws.append(raw_rate(self.source))
            self.add("raw", bandwidth=self.raws[-1])

    def around(self) -> float:
        """The raw rate before and behind a row."""
        self.raw()
        return sum(self.raws[-2:]) / 2

    def of_accelerate(self, folder: Path) -> None:
        """transformers' generate by accelerate's hooks, cold and warm."""
        layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
        places = {**dict.fromkeys(BESIDE, "cpu"), **{f"model.layers.{number}": "disk" for number in range(layers)}}
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", device_map=places, offload_folder=self.folder / "unused"
        ).eval()
        forget(folder)
        seconds, _ = timed(lambda: model.generate(self.prompts[0], max_new_tokens=1, do_sample=False))
        self.add("accelerate, the prompt", seconds=seconds)
        self.of_generate("accelerate, warm", model, 4)

    def before(self, decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
        self.raw()

    def read(self, regime: str, every: list[Statistics]) -> dict[str, float | None]:
        counts = [stats.streaming for stats in every]
        bandwidth = sum(each.bytes_read for each in counts) / sum(each.reading for each in counts)
        waited = sum(each.waiting for each in counts) / sum(stats.total_seconds for stats in every)
        of_raw = None if self.source is None else bandwidth / self.around()
        return {"bandwidth": bandwidth, "of_raw": of_raw, "waited": waited}


SHOWN = {  # a figure's name in the table, its format, its unit
    "seconds": ("s", ".3f", 1),
    "seconds_per_token": ("s/token", ".3f", 1),
    "times_plain": ("x plain", ".2f", 1),
    "tokens_per_step": ("tok/step", ".2f", 1),
    "seconds_per_step": ("s/step", ".3f", 1),
    "bandwidth": ("GB/s", ".2f", 1e-9),
    "of_raw": ("of raw", ".2f", 1),
    "waited": ("waited", ".0%", 1),
    "taken": ("MB taken", ".0f", 1e-6),
    "stream": ("MB of the stream", ".0f", 1e-6),
    "pinned": ("MB pinned", ".0f", 1e-6),
    "asked": ("MB asked", ".0f", 1e-6),
    "of_asked": ("of asked", ".2f", 1),
}


def shown(row: dict[str, Any]) -> str:
    """A row of the table."""
    words = [f"{SHOWN[name][0]} {value * SHOWN[name][2]:{SHOWN[name][1]}}"
             for name, value in row.items() if name in SHOWN]  # fmt: skip
    return "  ".join((f"{row['way']:<32}", *words))


def write_target(
    folder: Path, small: LlamaForCausalLM, nbytes: float, width: int, dtype: torch.dtype = torch.float32
) -> None:
    """A target of about so many bytes, a file for each layer; never more of it in memory than a few layers.

    All layers beyond the small model's say nothing, so one of them is made and written again and again.
    """
    folder.mkdir()
    own, heads = small.config.num_hidden_layers, width // 64
    heads = heads if heads >= small.config.num_attention_heads else width // 32
    widths = Widths(own + 1, width, heads, max(width * 11 // 4, small.config.intermediate_size))
    model = enlarged(small, widths, small.config.vocab_size, dtype)
    weights = {name: one.detach() for name, one in model.named_parameters()}
    of_layer = [{} for _ in range(own + 1)]
    beside: dict[str, Tensor] = {}
    for name, one in weights.items():
        parts = name.split(".")
        if parts[1] == "layers":
            of_layer[int(parts[2])][".".join(parts[3:])] = one
        else:
            beside[name] = one
    layer_bytes = sum(one.nbytes for one in of_layer[0].values())
    layers = max(own + 1, round((nbytes - sum(one.nbytes for one in beside.values())) / layer_bytes))
    index = dict.fromkeys(beside, "beside.safetensors")
    save_file(beside, folder / "beside.safetensors", {"format": "pt"})
    for number in range(layers):
        name = f"layer-{number:03}.safetensors"
        tensors = {f"model.layers.{number}.{key}": one for key, one in of_layer[min(number, own)].items()}
        save_file(tensors, folder / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    model.config.num_hidden_layers = layers
    model.config.save_pretrained(folder)
    facts = {"metadata": {"total_size": layers * layer_bytes}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(facts))
    os.sync()
    print(f"a target of {layers} layers of {layer_bytes / 1e6:.0f} MB", flush=True)


def forget(folder: Path) -> None:
    """Have the system drop a folder's files from its page cache."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_rate(folder: Path, most: float = 4e9) -> float:
    """Bytes a second at which the first files of a folder are read past the page cache, by READERS threads."""
    jobs, total, opened, own = [], 0, [], threading.local()
    for path in sorted({place.path for place in places_of_folder(folder).values()}):
        size = os.path.getsize(path)
        opened.append(os.open(path, os.O_RDONLY | os.O_DIRECT))
        for begin in range(0, size // BLOCK * BLOCK, CHUNK):
            if total < most:
                jobs.append((opened[-1], begin))
                total += min(CHUNK, size - begin)

    def read(job: tuple[int, int]) -> None:
        if not hasattr(own, "memory"):
            _, own.memory = aligned_memory(CHUNK)
        os.preadv(job[0], [own.memory], job[1])

    with ThreadPoolExecutor(READERS) as threads:
        seconds, _ = timed(lambda: [*threads.map(read, jobs)])
    for descriptor in opened:
        os.close(descriptor)
    return total / seconds


@contextmanager
def memory_limited(limit: str | None) -> Iterator[None]:
    """Have this process in a control group that may take so much memory, page cache included. None: no limit."""
    if limit is None:
        yield
        return
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    root, name = Path("/sys/fs/cgroup"), "memory.max"
    if not (root / "cgroup.controllers").exists():  # version 1
        root, name = root / "memory", "memory.limit_in_bytes"
    group = root / f"heavypath-{os.getpid()}"
    try:
        group.mkdir()
        (group / name).write_text(str(bytes_of(limit)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        raise SystemExit(
            f"--limit needs root, and a memory controller in {root}: {error}; without it run this script by "
            f"`systemd-run --user --scope -p MemoryMax={limit}`"
        ) from error
    try:
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


class Slowed:
    """Reads at no more than a rate, whoever reads."""

    def __init__(self, rate: float, clock: Callable[[], float] = time.perf_counter):
        self._rate, self._clock, self._lock, self._free = rate, clock, threading.Lock(), 0.0

    def __call__(self, file: WeightFile, into: memoryview, begin: int) -> None:
        with self._lock:
            self._free = max(self._free, self._clock()) + len(into) / self._rate
            until = self._free
        WeightFile.read(file, into, begin)
        time.sleep(max(0.0, until - self._clock()))


def anonymous_memory() -> int:
    """Bytes of memory of this process that are no files."""
    facts = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(facts["RssAnon"].split()[0]) << 10
