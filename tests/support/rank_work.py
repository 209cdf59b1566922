"""What the processes of tests/options/test_tensor_parallel.py do; each function is called in all of them."""

import hashlib
import os
import random
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from own_verifier import sample_the_target
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM, StoppingCriteria, logging
from transformers.distributed import DistributedConfig

from heavypath.kernels.nodes import Verified
from heavypath.speculative import EarlyExit, SpeculativeDecoder, TokenTree
from heavypath.speculative.ranks.agreement import RankMismatchError
from heavypath.speculative.ranks.communication import RankFailedError

METHODS = ("autoregressive", "chain", "specinfer", "sequoia", "dyspec", "ersd")
PROMPTS = torch.tensor([[5, 9, 8, 7, 33, 2], [0, 0, 4, 4, 17, 60], [0, 11, 12, 13, 14, 15]])
PADDING = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
OPTIONS = {"seed": 7, "attention_mask": PADDING, "eos_token_id": None}
TREE = TokenTree.from_branching([2, 2, 1])


def llama(seed, heads=12, layers=2):
    shape = {"hidden_size": 8 * heads, "intermediate_size": 144, "num_attention_heads": heads, "head_dim": 8}
    shape |= {"num_key_value_heads": heads, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0}
    return tiny_llama(seed, 100, layers, **shape)  # a vocabulary that neither 3 nor 4, in whole parts of 8, divides


def load(folder, name, **config):
    """A model that was saved; split if a config is given."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    split = {"distributed_config": DistributedConfig(**config)} if config else {}
    return AutoModelForCausalLM.from_pretrained(Path(folder, name), dtype=torch.float32, **split).eval()


def split_target(folder, name="target"):
    return load(folder, name, tp_plan="auto", tp_size=dist.get_world_size())


class Watching:
    """Stands in a decoder's runner: notes the target's logits of each step, and does something before each."""

    def __init__(self, decoder, before=lambda step, workspace: None):
        self._runner, self._before = decoder.runner, before
        self.logits = []
        decoder.runner = self

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def run(self, plan, workspace, **options):
        self._before(len(self.logits) + 1, workspace)
        stepped = self._runner.run(plan, workspace, **options)
        self.logits.append(stepped.raw_logits.clone())
        return stepped


def texts(target, drafts):
    """For each draft, by a method of its own: tokens, digests of each step's logits, and the first step's logits."""
    found = {}
    for (name, draft), method in zip(drafts.items(), ("sequoia", "dyspec", "ersd"), strict=True):
        decoder = SpeculativeDecoder(target, draft, method, tree_size=5)
        watching = Watching(decoder)
        out = decoder.generate(PROMPTS, 10, 0.6, **OPTIONS)
        digests = [hashlib.sha256(logits.numpy().tobytes()).hexdigest() for logits in watching.logits]
        found[name] = out.sequences, digests, watching.logits[0]
    return found


def decode(folder):
    """Texts with a draft that each rank has whole, with one that is split, and with an early exit; and our own pass."""
    target, draft = split_target(folder), load(folder, "draft")
    found = texts(target, {"whole": draft, "split": split_target(folder, "draft"), "exit": EarlyExit(1)})
    decoder = SpeculativeDecoder(target, None, "autoregressive")
    return found, (type(decoder._target).__name__, decoder._target.new_cache(1, 1).keys.shape[1])


def refusals(folder):
    """What is refused, and how a model is decoded that is split by FSDP."""
    found = {}
    for name, make in {
        "heads": lambda: SpeculativeDecoder(split_target(folder, "five"), None, "autoregressive"),
        "serve": lambda: SpeculativeDecoder(split_target(folder), None, "autoregressive").serve(),
    }.items():
        try:
            make()
        except ValueError as error:
            found[name] = str(error)
    target, draft = load(folder, "target", fsdp_size=dist.get_world_size()), load(folder, "draft")
    for _ in range(2):  # FSDP leaves weights gathered after a pass
        decoder = SpeculativeDecoder(target, draft, "sequoia")
        found["fsdp"] = decoder.generate(PROMPTS, 10, 0.6, **OPTIONS).sequences
    found["ranks of fsdp"] = decoder._target.ranks.count
    return found


def custom_generate(folder):
    """Texts by transformers' generate, with seeds that nobody gave."""
    target = split_target(folder)
    decoder = SpeculativeDecoder(target, load(folder, "draft"), "sequoia")
    torch.manual_seed(dist.get_rank())
    options = {"attention_mask": PADDING, "max_new_tokens": 8, "do_sample": True, "pad_token_id": 0}
    return [target.generate(PROMPTS, custom_generate=decoder, **options) for _ in range(2)]


class _OnOneRank(StoppingCriteria):
    """Ends a text after three tokens on rank 0, and counts how often it is asked."""

    asked = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.asked += 1
        return torch.tensor([dist.get_rank() > 0 or input_ids.shape[1] >= 9])


class _Streamer:
    """Keeps tokens; on rank 0 it fails when it has had so many calls."""

    def __init__(self, fails=1 << 30):
        self.tokens, self.calls, self.fails = [], 0, fails

    def put(self, value):
        self.calls += 1
        if self.calls > self.fails:
            raise OSError("nobody reads")
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def one_rank_decides(folder):
    """Stopping criteria, streamers, traces, Ctrl-C on another rank than 0; and how the decoder goes on after them."""
    decoder = SpeculativeDecoder(split_target(folder), load(folder, "draft"), "sequoia", tree=TREE)
    runner, options = decoder.runner, {"input_ids": PROMPTS[:1], "max_new_tokens": 12, "eos_token_id": None}
    usual = decoder.generate(**options).sequences
    criterion, streamer = _OnOneRank(), _Streamer()
    trace = Path(folder, f"trace-{dist.get_rank()}")
    out = decoder.generate(**options, stopping_criteria=[criterion], streamer=streamer, trace=trace)
    found = {"stopped": out.sequences[0, 6:].tolist(), "asked": criterion.asked}
    found |= {"streamed": streamer.tokens, "traced": trace.exists()}

    def interrupt(step, workspace):
        if step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without
    for name, before, fails in (("streamer", lambda *given: None, 2), ("ctrl-c", interrupt, 1 << 30)):
        watching = Watching(decoder, before)
        try:
            decoder.generate(**options, streamer=_Streamer(fails))
        except (OSError, RankFailedError, KeyboardInterrupt) as error:
            found[name] = type(error).__name__, str(error), len(watching.logits)
        decoder.runner = runner
    found["after all"] = torch.equal(decoder.generate(**options).sequences, usual)
    return found


def divergences(folder, trials):
    """What is raised where one rank differs: for each trial the kind, rank and step, and what was said."""
    target, draft = split_target(folder), load(folder, "draft")
    rank, count = dist.get_rank(), dist.get_world_size()
    chances = random.Random(5)  # the same on all ranks
    here = {"differs": False}

    def verifier(nodes, target_logits, draft_logits, **options):
        path, length, token = sample_the_target(nodes, target_logits, draft_logits, **options)
        return Verified(path, length, (token + here["differs"]) % target_logits.shape[-1])

    decoder = SpeculativeDecoder(target, draft, "sequoia", tree=TREE)
    own = SpeculativeDecoder(target, draft, "sequoia", tree=TREE, verifier=verifier)
    grown = SpeculativeDecoder(target, draft, "dyspec", tree_size=8, threshold=0.2)  # trees of several sizes
    head, norm = decoder._target._head, target.model.layers[1].input_layernorm.weight
    found = []
    for trial in range(trials):
        kind = ("another seed", "noise", "draft", "growth", "logits", "verdict", "weight")[trial % 7]
        guilty = chances.randrange(count) if count > 2 else 1
        step = chances.randint(1, 3) if kind in ("noise", "logits", "verdict") else 1
        used = {"verdict": own, "growth": grown}.get(kind, decoder)
        mine = rank == guilty

        def before(at, workspace, kind=kind, step=step, mine=mine):
            here["differs"] = mine and at == step and kind == "verdict"
            if mine and at == step and kind == "noise":
                workspace.state.seed.add_(1)
            if mine and at == step and kind == "logits":
                decoder._target._head = lambda hidden: head(hidden) + 1e-3

        of_draft = draft.model.layers[0].mlp.down_proj.weight
        changed = {"draft": of_draft, "growth": of_draft, "weight": norm}.get(kind) if mine else None
        if changed is not None:
            kept = changed.detach().clone()
            with torch.no_grad():
                changed.add_(0.5 if kind == "growth" else 1e-3)
        runner = used.runner
        watching = Watching(used, before)
        said = None
        try:
            used.generate(PROMPTS, 12, 0.8, seed=trial + (mine and kind == "another seed"), attention_mask=PADDING)
        except RankMismatchError as error:
            said = error.rank, error.what, str(error), len(watching.logits)
        used.runner, decoder._target._head = runner, head
        if changed is not None:
            with torch.no_grad():
                changed.copy_(kept)
        found.append((kind, guilty, step, said))
    return found


def die(folder):
    """Rank 1 is killed in the middle of a text; the others end by an error."""
    decoder = SpeculativeDecoder(split_target(folder), load(folder, "draft"), "sequoia", tree=TREE)

    def before(step, workspace):
        if step == 3:
            Path(folder, f"ready-{dist.get_rank()}").touch()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    Watching(decoder, before)
    decoder.generate(PROMPTS, 40, eos_token_id=None, attention_mask=PADDING)


def architectures(folder, kinds):
    """Texts of models of several kinds, which transformers' own forward pass runs."""
    draft, found = load(folder, "llama"), {}
    for kind in kinds:
        decoder = SpeculativeDecoder(split_target(folder, kind), draft, "dyspec")
        found[kind] = type(decoder._target).__name__, decoder.generate(PROMPTS, 12, 0.8, **OPTIONS).sequences
    return found


def every_check(folder, trials):
    """All that ranks do in the tests, in one group of processes: imports take most of the time. Then one is killed."""
    found = {
        "decode": decode(folder), "refusals": refusals(folder), "custom": custom_generate(folder),
        "decides": one_rank_decides(folder), "divergences": divergences(folder, trials),
    }  # fmt: skip
    torch.save(found, Path(folder, f"checks-{dist.get_rank()}"))
    dist.barrier()
    die(folder)
