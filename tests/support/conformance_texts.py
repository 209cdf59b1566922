"""Texts of a conformance row: in each way that the package decodes, by transformers, and their law by enumeration.

A text is the list of a prompt's new tokens.
"""

from functools import partial

import torch
from conformance_parts import EOS, FILTERS, PROMPTS, SEED, grammar_of
from conformance_rows import RECURRENT
from processed_texts import processed_law
from texts_with_rules import left_padded
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from heavypath.kernels.filtering import Filters

LENGTH = 4  # of texts whose law is enumerated


class Told:
    """A streamer that keeps the tokens it is told."""

    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def texts(case, decoder, *, way=None, only=None, past=None):
    """The texts of a case's batch, or of its sequence `only` alone, by a decoder in some way (default: the row's)."""
    way = case.row["way"] if way is None else way
    places = [*range(len(case.members))] if only is None else [only]
    ids, mask = left_padded([PROMPTS[case.members[place]] for place in places]).values()
    settings = {"temperature": case.row["temperature"], **case.sampling, **case.ending, **case.constraints_of(places)}
    if way == "served":
        return served(case, decoder, places, settings)
    if way == "custom_generate":
        return by_custom_generate(case, decoder, places, ids, mask)
    options = {
        "attention_mask": mask, "sequence_ids": torch.tensor(places), "seed": SEED, "max_new_tokens": case.new_tokens,
        "pad_token_id": 0, **settings,
    }  # fmt: skip
    streamers = [Told() for _ in places] if way == "streamer" else None
    if case.row["past"] if past is None else past:
        before = decoder.generate(ids[:, :-2], **options | {"attention_mask": mask[:, :-2], "max_new_tokens": 3})
        options["past"] = before.cache
    out = decoder.generate(ids, **options, streamer=streamers)
    found = [
        row[ids.shape[1] :][:count].tolist() for row, count in zip(out.sequences, out.stats.tokens_of, strict=True)
    ]
    if "past" in options:
        # States are there at the ends of texts and of prompts alone, and a head may have read less.
        by_head = case.row["target"] in RECURRENT and case.row["draft"] in ("head", "p-eagle", "medusa", "block", "mtp")
        unsure = decoder._draft.unsure_rows(out.stats.depth)  # of a head more in deeper trees
        assert out.stats.reused_tokens > 0 or ids.shape[1] < unsure + 4 or by_head
    for told, text in zip(streamers or [], found if streamers else [], strict=True):
        assert told.tokens[len(told.tokens) - len(text) :] == text
        assert told.ended
    return found


def served(case, decoder, places, settings):
    """Side by side by a service, whose name of a sequence's noise is the request's seed."""
    with decoder.serve(slots=3, max_tokens=40, seed=SEED) as service:
        requests = [
            service.submit(PROMPTS[case.members[place]], case.new_tokens, seed=place, **settings) for place in places
        ]
        return [request.result(60).tokens for request in requests]


def by_custom_generate(case, decoder, places, ids, mask):
    """By transformers' generate, which calls the decoder; alone a sequence has another name there, and other noise."""
    assert len(places) == len(case.members) or case.row["temperature"] == 0 or places == [0]
    sampled = case.row["temperature"] > 0
    off = {"top_k": 0, "top_p": 1.0, "temperature": case.row["temperature"]} if sampled else {}
    options = {"do_sample": sampled, **off, **(case.sampling if sampled else without_filters(case)), **case.ending}
    tokenizer = options.pop("tokenizer", None)
    stops = {name: options.pop(name) for name in ("stop_strings",) if name in options}
    own = LogitsProcessorList(case.processors(0) + grammars(case, ids.shape[1]))
    out = case.target.generate(
        ids, attention_mask=mask, max_new_tokens=case.new_tokens, pad_token_id=0, **options, **case.allowed,
        logits_processor=own, custom_generate=partial(decoder, seed=SEED, tokenizer=tokenizer, **stops),
        return_dict_in_generate=True,
    )  # fmt: skip
    counts = out.stats.tokens_of
    return [row[ids.shape[1] :][:count].tolist() for row, count in zip(out.sequences, counts, strict=True)]


def without_filters(case):
    """The settings that greedy text has, too."""
    return {name: value for name, value in case.sampling.items() if name not in ("top_k", "top_p", "min_p")}


def grammars(case, width):
    return [grammar_of(case.vocab_size).as_processor(width)] if case.row["grammar"] else []


def by_transformers(case, place):
    """The greedy text of a sequence, by transformers' own generate."""
    number = case.members[place]
    ids = torch.tensor([PROMPTS[number]])
    own = LogitsProcessorList(case.processors(place) + grammars(case, ids.shape[1]))
    out = case.target.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=case.new_tokens, do_sample=False, pad_token_id=0,
        **without_filters(case), **case.ending, **case.allowed, logits_processor=own,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


@torch.inference_mode()
def greedy_gaps(case, place, text):
    """How far below the likeliest token each token of a text is, by the target's own pass over it or by one in fp32."""
    prompt = PROMPTS[case.members[place]]
    whole, processors, gaps = torch.tensor([prompt + text]), every_processor(case, place), []
    for model in (case.target, case.exact_target):
        logits = model(whole[:, :-1]).logits[0, len(prompt) - 1 :].float()
        for end, row in enumerate(logits):
            row[:] = processors(whole[:, : len(prompt) + end], row[None])[0]
        gaps.append(logits.amax(1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0])
    return torch.minimum(gaps[0], gaps[1])


def every_processor(case, place):
    """All that is done to logits before temperature and filters, in the order of transformers' generate."""
    width, processors = len(PROMPTS[case.members[place]]), []
    if "repetition_penalty" in case.sampling:
        processors.append(theirs.RepetitionPenaltyLogitsProcessor(case.sampling["repetition_penalty"]))
    if "min_new_tokens" in case.sampling:
        processors.append(theirs.MinNewTokensLengthLogitsProcessor(width, case.sampling["min_new_tokens"], EOS))
    if case.allowed:
        processors.append(theirs.PrefixConstrainedLogitsProcessor(case.allowed["prefix_allowed_tokens_fn"], 1))
    return LogitsProcessorList(processors + case.processors(place) + grammars(case, width))


def law_of(case):
    """The joint law [V, V, V, V] of the first prompt's new tokens, by enumeration; the end fills up."""
    filters = Filters(case.row["temperature"], **FILTERS[case.row["filter"]])
    end, prompt = EOS if case.row["stop"] == "token" else None, torch.tensor(PROMPTS[case.members[0]])
    law = processed_law(case.target, prompt, every_processor(case, 0), filters, LENGTH, end)
    return law.view([case.vocab_size] * LENGTH)


def sampled(case, decoder, sequences):
    """Texts LongTensor[N, 4] of the first prompt, `sequences` of them; fewer where each of them takes long."""
    row = case.row
    asked = row["grammar"] or row["processors"] != "none" or row["draft"] == "lookahead"
    slow = row["draft"] in ("lookup", "p-eagle", "retrieval", "recall", "mtp", "mixture", "merge", "cascade")
    slow = (
        slow
        or row["target"] == "toy gpt2"
        or row["way"] == "reference"
        or row["tree"] == "deep"
        or row["verifier"] == "own"
    )
    prompt = torch.tensor(PROMPTS[case.members[0]])
    sequences = min(500, sequences // 20) if asked else min(4_000, sequences // 2) if slow else sequences
    out = decoder.generate(
        prompt.expand(sequences, -1), LENGTH, temperature=case.row["temperature"], **case.sampling, seed=SEED,
        eos_token_id=EOS if case.row["stop"] == "token" else None, pad_token_id=EOS,
        **case.constraints_of([0] * sequences),
    )  # fmt: skip
    new = out.sequences[:, len(prompt) :]
    return torch.nn.functional.pad(new, (0, LENGTH - new.shape[1]), value=EOS)
