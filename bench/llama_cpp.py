"""llama.cpp from a package that pip gets: how it is built, what of it is missing, how long it takes for a text.

Weights come to it as GGUF files in fp32, by the package `gguf`: pip install '.[peers]'. Tokens are spelled by their
numbers, token 7 as "<0007>", in the place of the tokenizer's texts: llama.cpp knows the expressions by which texts are
split before merging only for the tokenizers on its list, which the shipped pair's is not. So llama.cpp reads exactly
the tokens that it is given, and what it writes can be compared token by token.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

PACKAGE = "llama-cpp-python==0.3.36"  # options of its programs have changed between versions
FOLDER = Path.home() / ".cache/heavypath/llama.cpp"
COMPLETION, SPECULATIVE, SIMPLE = "llama-completion", "llama-speculative", "llama-speculative-simple"
PROGRAMS = (COMPLETION, SPECULATIVE, SIMPLE)
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF", "-DLLAMA_BUILD_TOOLS=ON", "-DLLAMA_BUILD_EXAMPLES=ON",
)  # fmt: skip
TRIES = 3  # the speculative programs end, now and then, before their figures are printed
MILLISECONDS = re.compile(r" eval time =\s+([\d.]+) ms /\s+(\d+) runs")
DECODED = re.compile(r"decoded\s+(\d+) tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+) t/s")


class Asked(NamedTuple):
    """What a way to decode is asked for. No text ends early."""

    new_tokens: int
    temperature: float
    threads: int
    seed: int


class Timed(NamedTuple):
    """How many tokens the seconds were spent on, and the tokens of the text, of which there may be a few more."""

    tokens: int
    seconds: float
    text: list[int]


class Drafting(NamedTuple):
    """The most tokens that llama.cpp drafts at a time; it stops before one that is less likely than `least`."""

    depth: int
    least: float = 0.0

    def __str__(self) -> str:
        return f"{self.depth}" if self.least == 0 else f"{self.depth}, {self.least}"


Runner = Callable[[list[int], Asked], Timed]


def missing(folder: Path) -> list[str]:
    """The names of what is missing: of the programs in a folder, and of the package that writes weights for them."""
    programs = [name for name in PROGRAMS if not (folder / name).is_file()]
    return programs + ["gguf"] * (importlib.util.find_spec("gguf") is None)


def how_to_get(lacking: list[str], folder: Path) -> str:
    """What is left out for want of these, and how to get them."""
    lines = [f"without {', '.join(lacking)}; the others are measured all the same"] if lacking else []
    if {*lacking} & {*PROGRAMS}:
        lines += [
            f"llama.cpp: expected its programs in {folder}. Give --llama-cpp the folder where they are, or --build, "
            "which needs cmake and a C++ compiler, takes 6 minutes on two cores, and runs",
            *(f"    {' '.join(command)}" for command in build_commands()),
        ]
    if "gguf" in lacking:
        lines.append("gguf writes the weights for llama.cpp: pip install '.[peers]', or pip install 'gguf>=0.17'")
    return "\n".join(lines)


def build_commands() -> list[list[str]]:
    """The commands that get llama.cpp and build it in FOLDER."""
    archive = f"{FOLDER}/{PACKAGE.replace('-', '_').replace('==', '-')}"
    source = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", f"{FOLDER}", PACKAGE]
    return [
        [sys.executable, "-m", "pip", "download", *source],
        ["tar", "-xzf", f"{archive}.tar.gz", "-C", f"{FOLDER}"],
        ["cmake", "-S", f"{archive}/vendor/llama.cpp", "-B", f"{FOLDER}", *CMAKE_OPTIONS],
        ["cmake", "--build", f"{FOLDER}", "--parallel", "2", "--target", *PROGRAMS],
    ]


def build() -> Path:
    """Download and build llama.cpp. Returns the folder of its programs. Raises CalledProcessError if that fails."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for command in build_commands():
        subprocess.run(command, check=True)
    return FOLDER / "bin"


def plain_runner(folder: Path, target: Path) -> Runner:
    """llama-completion: "eval time", which is that of its forward passes of one token; the prompt yields the first."""

    def run(prompt: list[int], asked: Asked) -> Timed:
        options = ("-no-cnv", "--no-display-prompt", "--simple-io", "--perf")
        text, found = _output([f"{folder / COMPLETION}", "-m", f"{target}", *options], prompt, asked, MILLISECONDS)
        return Timed(int(found[2]), float(found[1]) / 1e3, text)

    return run


def speculative_runner(folder: Path, program: str, models: tuple[Path, Path], drafting: Drafting) -> Runner:
    """llama-speculative or llama-speculative-simple: "decoded", all that they do after the prompt's forward passes.

    models: target and draft. Flash attention is off: several tokens a forward pass take a fifth less time so.
    """
    target, draft = models
    kind = ("--spec-type", "draft-simple") if program == SIMPLE else ()
    limits = ("--spec-draft-n-max", f"{drafting.depth}", "--spec-draft-p-min", f"{drafting.least}")
    options = ("-m", f"{target}", "-md", f"{draft}", *kind, *limits, "-fa", "off")

    def run(prompt: list[int], asked: Asked) -> Timed:
        text, found = _output([f"{folder / program}", *options], prompt, asked, DECODED)
        return Timed(int(found[1]), int(found[1]) / float(found[2]), text[len(prompt) :])

    return run


def _output(
    command: Sequence[str], prompt: list[int], asked: Asked, figures: re.Pattern[str]
) -> tuple[list[int], re.Match[str]]:
    """The tokens that a program prints, and its figures. Raises RuntimeError if it prints none several times."""
    room = len(prompt) + asked.new_tokens + 64
    whole = [
        *command,
        *("-p", spelled(prompt), "-n", f"{asked.new_tokens}", "-c", f"{max(512, room)}", "--ignore-eos"),
        *("-t", f"{asked.threads}", "-s", f"{asked.seed}"),
        *("--samplers", "temperature", "--temp", f"{asked.temperature}"),
    ]
    for _ in range(TRIES):
        done = subprocess.run(whole, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        found = figures.search(done.stderr) or figures.search(done.stdout)
        if done.returncode == 0 and found is not None:
            return tokens_spelled(done.stdout), found
    raise RuntimeError(
        f"expected figures like {figures.pattern!r} from {command[0]}, got none in {TRIES} runs, the last with status "
        f"{done.returncode}; run it by hand:\n{' '.join(whole)}\n{done.stderr[-1000:]}"
    )


MODULES = {  # of a layer, by the names that llama.cpp has for them
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def spelled(tokens: Sequence[int]) -> str:
    """The text that llama.cpp reads as these tokens."""
    return "".join(f"<{token:04}>" for token in tokens)


def tokens_spelled(text: str) -> list[int]:
    """The tokens of a text that llama.cpp wrote."""
    return [int(digits) for digits in re.findall(r"<(\d{4,})>", text)]


@torch.no_grad()
def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """Write a model and its vocabulary. Raises ValueError for biases, and for rotary embeddings that are scaled."""
    import gguf

    config: Any = model.config
    if config.attention_bias or config.mlp_bias or config.rope_parameters["rope_type"] != "default":
        raise ValueError(
            f"expected a Llama without biases, with default rotary embeddings, got attention_bias="
            f"{config.attention_bias}, mlp_bias={config.mlp_bias}, {config.rope_parameters}; take another model"
        )
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, config)
    _add_vocabulary(writer, gguf.TokenType.USER_DEFINED, config)
    for name, weight in weights_of(model).items():
        writer.add_tensor(name, weight.float().contiguous().cpu().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: Any, config: Any) -> None:
    """Write what a Llama's config says, by the names that llama.cpp has for it."""
    import gguf

    for name, value in {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads,
        "key_length": config.head_dim, "value_length": config.head_dim, "rope_dimension_count": config.head_dim,
        "rope_freq_base": config.rope_parameters["rope_theta"], "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size, "file_type": gguf.LlamaFileType.ALL_F32,
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(value)


def weights_of(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """A model's weights by the names that llama.cpp has for them, with rows as it takes them."""
    found = {"token_embd": model.model.embed_tokens.weight, "output_norm": model.model.norm.weight}
    if not model.config.tie_word_embeddings:  # else llama.cpp takes the embeddings
        found["output"] = model.lm_head.weight
    for number, layer in enumerate(model.model.layers):
        for name, module in MODULES.items():
            weight = layer.get_submodule(module).get_parameter("weight")
            rows = paired(weight, model.config.head_dim) if name in ("attn_q", "attn_k") else weight
            found[f"blk.{number}.{name}"] = rows
    return {f"{name}.weight": weight for name, weight in found.items()}


def paired(weight: Tensor, head_dim: int) -> Tensor:
    """The rows of each head as llama.cpp rotates them: 2i with 2i + 1, where transformers rotates i with i + d/2."""
    order = torch.arange(head_dim).view(2, -1).T.flatten()
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def _add_vocabulary(writer: Any, token_type: int, config: Any) -> None:
    """All tokens are user-defined, which are found in a text before any merging; so the merge is never used."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([spelled([token]) for token in range(config.vocab_size)])
    writer.add_token_types([token_type] * config.vocab_size)
    writer.add_token_merges(["< 0"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
