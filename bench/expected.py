"""Does decoding bring the tokens per forward pass of the target that a profile promises?

    python bench/expected.py [--texts 12] [--tokens 96] [--nodes 8] [--json bench/results/expected-cpu.json]

A profile is made of the shipped pair as `heavypath calibrate` makes one: acceptance is counted, and gains are measured,
on --texts texts of --tokens tokens after each of the prompts, at T = 0 on one. Costs alone are given, so that no load
of the machine changes a plan: a tree of up to --nodes nodes takes as long as a token, and drafting a level a fiftieth
of that. Then a decoder with the profile, and its default verifier, continues the same prompts as often, under another
seed.

expected     tokens per forward pass that the plan promises
decoded      those of the decoder. The last step of a text counts as a whole, though the text is cut off within it
off          expected / decoded - 1
error        the standard error of that: a jackknife over the prompts, which both share, and the error of the gain
"""

import math
from argparse import Namespace
from collections.abc import Iterator

import torch
from batches import Counts, batch_of, jackknife
from common import Row, argument_parser, environment, options_of, quiet_demo_pair, report, token_ids
from torch import Tensor
from transformers.generation.stopping_criteria import MaxLengthCriteria

from heavypath.kernels.filtering import Filters
from heavypath.speculative import SpeculativeDecoder
from heavypath.speculative.calibration import cost_environment
from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.demo import DemoPair, demo_prompts
from heavypath.speculative.drafts.kinds import as_draft, describe, draft_parameter_count, parameter_count
from heavypath.speculative.gains import jobs_of, measure_gains
from heavypath.speculative.methods import measured_row
from heavypath.speculative.models.llama import LlamaForward
from heavypath.speculative.profile import MeasuredAcceptance, Profile
from heavypath.speculative.trees.ranks import steps_of
from heavypath.speculative.walking import Extent, Way, measure_ways

METHODS, LEVEL = ("chain", "sequoia", "dyspec"), 0.02
COUNTED, DECODED, MOST_LEVELS = 0, 1000, 32  # seeds; levels of a tree


def counted(pair: DemoPair, prompts: list[Tensor], given: Namespace) -> tuple[MeasuredAcceptance, ...]:
    """The acceptance of all methods; text i of each is of prompt i modulo their number."""
    forward, rows = LlamaForward(pair.target, "target"), [prompt[0] for prompt in prompts]
    source, found = as_draft(pair.draft, forward, pair.target), ()
    for temperature in given.temperature:
        ways = dict.fromkeys(Way(*measured_row(method, None, "cpu").at(temperature), None) for method in METHODS)
        wanted = [(way, Filters(temperature)) for way in ways]
        extent = Extent.of_trees(given.tokens, len(prompts) * texts_of(temperature, given), source.levels)
        found += measure_ways(forward, source, rows, wanted, extent, COUNTED, math.inf, print)
    return found


def texts_of(temperature: float, given: Namespace) -> int:
    """Texts after each prompt: a greedy one is always the same."""
    return given.texts if temperature else 1


def profile_of(
    pair: DemoPair, prompts: list[Tensor], acceptance: tuple[MeasuredAcceptance, ...], nodes: int
) -> Profile:
    """The profile with costs of trees of up to so many nodes, and with gains."""
    target, draft, _ = pair
    profile = Profile(
        describe(target), describe(draft), parameter_count(target), draft_parameter_count(draft, target),
        cost_environment(target), CostsByBatch({1: Costs({1: 1.0, nodes: 1.0}, LEVEL)}), acceptance,
    )  # fmt: skip
    gains = measure_gains(
        [*jobs_of(target, draft, profile, METHODS)], [prompt[0] for prompt in prompts],
        positions=target.config.max_position_embeddings, until=math.inf, seed=COUNTED, report=print,
    )  # fmt: skip
    return Profile(**{**vars(profile), "gains": gains})


def decoded(
    pair: DemoPair, profile: Profile, prompts: list[Tensor], method: str, sampling: Filters, given: Namespace
) -> Tensor:
    """Steps and tokens of whole steps after each prompt, fp64 [prompts, 2]."""
    decoder, room = SpeculativeDecoder(pair.target, pair.draft, method, profile=profile), MOST_LEVELS
    texts = batch_of(prompts, texts_of(sampling.temperature, given))
    end = MaxLengthCriteria(texts.tokens.shape[1] + given.tokens)
    stats = decoder.generate(
        texts.tokens, given.tokens + room, temperature=sampling.temperature, seed=DECODED, stopping_criteria=[end],
        **texts.options,
    ).stats  # fmt: skip
    tokens, steps = Counts.of(stats, texts.seeds)
    whole = (stats.steps + int(stats.accepted.sum())) / stats.new_tokens  # more than are kept of the last steps
    return torch.stack([steps, whole * tokens], 1)


def rows(given: Namespace) -> Iterator[Row]:
    pair = quiet_demo_pair()
    prompts = token_ids(pair.tokenizer, demo_prompts()[: given.prompts])
    acceptance = counted(pair, prompts, given)
    for nodes in given.nodes:
        profile = profile_of(pair, prompts, acceptance, nodes)
        for temperature in given.temperature:
            for method in METHODS:
                sampling = Filters(temperature)
                planned = profile.plan(method, sampling)
                factor = planned.gain.factor if planned.gain else 1.0
                promised = torch.from_numpy(steps_of(planned.plan.tree, planned.acceptance.counts.texts))
                promised = promised.view(-1, len(prompts), 2).sum(0).double()
                own = decoded(pair, profile, prompts, method, sampling, given)

                def off(kept: Tensor, promised: Tensor = promised, own: Tensor = own, factor: float = factor) -> float:
                    (steps, tokens), (others, brought) = promised[kept].sum(0), own[kept].sum(0)
                    return float((1 + (tokens / steps - 1) * factor) / (brought / others)) - 1

                found = jackknife(off, len(prompts))
                gain = planned.gain if temperature else None  # greedy texts are those by which it was measured
                of_gain = (planned.plan.expected_tokens - 1) * gain.error / factor if gain else 0.0
                steps, tokens = own.sum(0).tolist()
                yield {
                    "nodes": nodes, "temperature": temperature, "method": method, "tree": len(planned.plan.tree),
                    "levels": planned.plan.tree.depth, "factor": factor, "expected": planned.plan.expected_tokens,
                    "decoded": tokens / steps, "off": found.value,
                    "error": math.hypot(found.standard_error, of_gain / planned.plan.expected_tokens),
                    "promised_error": planned.tokens_error, "steps": int(steps),
                }  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--texts", type=int, default=12, help="after each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.6, 1.0])
    given = options_of(parser, prompts=2, texts=1, tokens=8, nodes=[4], temperature=[0.6])
    facts = environment("cpu", given, "prompts", "texts", "tokens", "nodes", "temperature")
    report(rows(given), facts, given.json, title="expected and decoded tokens per forward pass")


if __name__ == "__main__":
    main()
