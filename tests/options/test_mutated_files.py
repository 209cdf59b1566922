"""Files that others wrote, with any one value another: each is taken and works, or refused with the file's name."""

import json
import random
import re
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from block_checkpoints import LAYOUTS
from block_checkpoints import driven as driven_block
from block_checkpoints import variant as block_variant
from head_checkpoints import TEXT, as_speculators, driven, official, settings, tiny_target, variant, write
from medusa_checkpoints import published
from medusa_checkpoints import write as write_medusa
from profile_cases import REJECTION, counts, greedy_counts, profile_of

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Profile, SpeculativeDecoder, read_trace
from heavypath.speculative.drafts.blocks.checkpoint import is_block, load_block
from heavypath.speculative.drafts.heads.checkpoint import is_head, load_head
from heavypath.speculative.drafts.medusa.checkpoint import load_medusa
from heavypath.speculative.files.checkpoint import Checkpoint
from heavypath.speculative.output.page import trace_page
from heavypath.speculative.streaming.source import INDEX, places_in, places_of_folder

WRITTEN = {"1e400": "1e400", "-1e400": "-1e400", "NaN": "NaN", "deep": "[" * 5000 + "]" * 5000, "long": "9" * 400,
           "longest": "9" * 5000}  # fmt: skip
VALUES = ("x", "", "0", "../x", "\0", [], [1], [[1]], [None], {}, {"a": 1}, None, True, False, 0, 1, 3, -1, -0.5, 1.5,
          1e308, 2**31, 2**63, -(2**63), *({"written": name} for name in WRITTEN))  # fmt: skip
FEW = 60  # of the mutations of a file; all of them are slow


def places(value, path=()):
    """The keys that lead to every value in JSON, the outermost first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(value, path, change):
    """A copy of JSON with one value changed by a function of what holds it and its key."""
    box = [json.loads(json.dumps(value))]
    holder, key = box, 0
    for step in path:
        holder, key = holder[key], step
    change(holder, key)
    return box[0] if box else None


def put(value):
    def change(holder, key):
        holder[key] = value

    return change


def add(holder, key):
    if isinstance(holder[key], dict):
        holder[key]["another"] = 1
    elif isinstance(holder[key], list):
        holder[key] += holder[key][-1:] or [1]


def rename(holder, key):
    if isinstance(holder, dict):
        holder[f"{key}7"] = holder.pop(key)
    else:
        holder.insert(0, holder.pop(key))


CHANGES = [*map(put, VALUES), lambda holder, key: holder.pop(key), add, rename]


def as_text(value):
    text = json.dumps(value)
    for name, written in WRITTEN.items():
        text = text.replace(json.dumps({"written": name}), written)
    return text


def mutations(original, how_many):
    """Texts of JSON, each with one value changed, and before them some that are no JSON."""
    every = [(path, change) for path in places(original) for change in CHANGES]
    every = every if how_many is None else random.Random(7).sample(every, min(how_many, len(every)))
    yield from ("", "{", "\ufeff{}", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"))
    yield from (as_text(changed(original, path, change)) for path, change in every)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


HEADS = {
    "official": (settings(variant(), heavypath={"taps": [2, 4, 5], "feeds_back_normed": False},
                          tie_word_embeddings=False, rope_scaling={"type": "linear", "factor": 2.0},
                          eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}), official(variant())),
    "llama 3": (settings(variant(), rope_theta=None, rope_parameters={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 64}), official(variant())),
    "yarn": (settings(variant(), rope_scaling={"rope_type": "yarn", "factor": 8.0}), official(variant())),
    "speculators": as_speculators(variant(tap_norms=True)),
    "eagle-1": (settings(variant(generation=1)), official(variant(generation=1))),
}  # fmt: skip


# For each file: its JSON, a function that writes another text in its place, and one that uses the file.


def config_of_a_head(kind, target, folder):
    config, tensors = HEADS[kind]
    write(folder, config, tensors)
    known = set()

    def use():
        is_head(Checkpoint(folder))
        head = load_head(folder, target)
        if repr(head.config) not in known:
            known.add(repr(head.config))
            assert driven(head, target).shape[0] == len(TEXT) + 1

    return config, lambda text: (folder / "config.json").write_text(text, "utf-8"), use


def config_of_a_block(layout, target, folder):
    options, write_as = LAYOUTS[layout]
    config, tensors = write_as(block_variant(**options))
    write(folder, config, tensors)
    known = set()

    def use():
        if not is_block(Checkpoint(folder)):
            raise ValueError(f"{folder} is an EAGLE head")
        head = load_block(folder, target)
        if repr(head.config) not in known:
            known.add(repr(head.config))
            assert driven_block(head, target, TEXT).shape == (1, 40)

    return config, lambda text: (folder / "config.json").write_text(text, "utf-8"), use


def index(target, folder):
    write(folder, settings(variant()), official(variant()), INDEX)
    inside = {str(path) for path in folder.glob("*.safetensors")}

    def use():
        assert {place.path for place in places_of_folder(folder).values()} <= inside
        load_head(folder, target)

    original = json.loads((folder / INDEX).read_text())
    return original, lambda text: (folder / INDEX).write_text(text, "utf-8"), use


def header_of_safetensors(kind, target, folder):
    if kind == "head":
        path, load = write(folder, *HEADS["official"]) / "model.safetensors", load_head
    else:
        path, load = folder / "medusa_lm_head.safetensors", load_medusa
        write_medusa(folder, published(target), path.name)
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")

    def put_text(text):
        header = text.encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + content[begin:])

    def use():
        for place in places_in(path).values():
            assert 8 < place.begin <= place.end <= path.stat().st_size
        load(folder, target)

    return json.loads(content[8:begin]), put_text, use


def profile(target, folder):
    first = replace(
        counts([[700, 100], [600, 80]]), moments=[[100.0, 60.0, 40.0, 70.0, 45.0], [60.0, 10.0, 3.0, 12.0, 4.0]],
        moments_by_depth=[[[40.0, 10.0, 8.0, 10.0, 5.0]]], temperatures=[1.0, 0.5],
    )  # fmt: skip
    race = REJECTION._replace(verification="race", sequence_count=2)
    path, known = folder / "profile.json", set()
    profile_of(first, greedy_counts([[80, 10]], [100]), counts([[80, 10]], 100, 1.0, race)).save(path)

    def use():
        loaded = Profile.load(path)
        ways = product(("sequoia", "chain", "dyspec", "rsd-c", "ersd"), (0.0, 1.0), (1, 3))
        for method, heat, batch in ways if repr(loaded) not in known else ():
            if any(entry.is_of(loaded.row(method), heat) for entry in loaded.acceptance):
                planned = loaded.plan(method, Filters(heat), batch)
                assert planned.plan.speedup > 0
                assert loaded.speedup_error(planned, batch) >= 0
                assert loaded.limit(method, planned, batch).without_that > 0
                assert loaded.mbsu(planned.plan) > 0
                assert loaded.tree_for(method, Filters(heat), batch)
        known.add(repr(loaded))

    return json.loads(path.read_text()), lambda text: path.write_text(text, "utf-8"), use


def line_of_a_trace(line, pair, folder):
    path, ids = folder / "trace", pair.tokenizer("def read", return_tensors="pt").input_ids
    decoder = SpeculativeDecoder(pair.target, pair.draft, "sequoia", tree_size=6)
    decoder.generate(ids, 6, temperature=0.8, trace=path, tokenizer=pair.tokenizer)
    lines = path.read_text().split("\n")
    assert len(lines) > 3

    def put_text(text):
        path.write_text("\n".join([*lines[:line], text, *lines[line + 1 :]]), "utf-8")

    return json.loads(lines[line]), put_text, lambda: trace_page(*read_trace(path))


FILES = {
    **{f"config of {kind}": partial(config_of_a_head, kind) for kind in HEADS},
    **{f"config of {layout}": partial(config_of_a_block, layout) for layout in ("DFlash2", "DSpark", "speculators")},
    "index": index,
    **{f"header of {kind}": partial(header_of_safetensors, kind) for kind in ("head", "medusa")},
    "profile": profile,
    **{f"line {line} of a trace": partial(line_of_a_trace, line) for line in range(3)},
}


@pytest.mark.parametrize("how_many", [FEW, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES.values(), ids=FILES)
def test_a_file_with_any_one_value_another_works_or_is_refused_with_its_name(
    file, how_many, target, demo_pair, tmp_path
):
    original, put_text, use = file(demo_pair if getattr(file, "func", None) is line_of_a_trace else target, tmp_path)
    refused = []
    for text in mutations(original, how_many):
        put_text(text)
        try:
            use()
            refused.append(False)
        except Exception as error:
            if not isinstance(error, ValueError | FileNotFoundError) or str(tmp_path) not in str(error):
                raise AssertionError(f"{error!r} for {text[:3000]}") from error
            refused.append(True)
    assert {*refused} == {True, False}


@pytest.mark.parametrize("length", [0, 7, 8, 100, -1])
def test_a_file_of_weights_that_is_cut_off(length, target, tmp_path):
    path = write(tmp_path, settings(variant(), architectures=None), official(variant())) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    uses = [places_in, lambda path: places_of_folder(path.parent), lambda path: is_head(Checkpoint(path.parent)),
            lambda path: load_head(path.parent, target)]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match=re.escape(str(path))):
            use(path)


STRANGE = [
    {"fc.weight": torch.tensor(1.0)},
    {"d2t": torch.zeros(0, dtype=torch.long)},
    {"d2t": torch.zeros(24, dtype=torch.complex64)},
    {"layers.999999999.mlp.up_proj.weight": torch.zeros(24, 16)},
    {"layers." + "9" * 5000 + ".mlp.up_proj.weight": torch.zeros(24, 16)},
    {"layers.7.mlp.up_proj.weight": torch.tensor(1.0)},
]
STRANGE_MEDUSA = [
    {"999999999.0.weight": torch.zeros(40, 16)},
    {"9" * 5000 + ".0.weight": torch.zeros(40, 16)},
    {"0.0.linear.weight": torch.tensor(1.0)},
    {7: torch.zeros(40, 16)},
    {"0.0.linear.bias": torch.zeros(16).to_sparse()},
    {"0.0.linear.bias": torch.zeros(16, device="meta")},
]


def test_strange_tensors_are_refused_at_once(target, tmp_path):
    config, tensors = HEADS["official"]
    cases = [(load_head, partial(write, tmp_path, config, tensors | more)) for more in STRANGE]
    for more in STRANGE_MEDUSA:
        cases += [(load_medusa, partial(write_medusa, tmp_path, each)) for each in (published(target) | more, more)]
    for load, put in cases:
        put()
        with pytest.raises(ValueError, match=r"head|Head|in '") as caught:
            load(tmp_path, target)
        assert str(tmp_path) in str(caught.value)
