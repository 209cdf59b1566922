"""Files that others wrote, with any one value another: each is taken and works, or refused with the file's name."""

import json
import random
import re
from dataclasses import replace

import pytest
import torch
from head_checkpoints import TEXT, as_speculators, driven, official, settings, tiny_target, variant, write
from medusa_checkpoints import published
from medusa_checkpoints import write as write_medusa
from profile_cases import counts, greedy_counts, profile_of

from heavypath.kernels.filtering import Filters
from heavypath.speculative import Profile, SpeculativeDecoder, read_trace
from heavypath.speculative.drafts.heads.checkpoint import is_head, load_head
from heavypath.speculative.drafts.medusa.checkpoint import load_medusa
from heavypath.speculative.methods import Kind
from heavypath.speculative.output.page import trace_page
from heavypath.speculative.streaming.source import INDEX, places_in, places_of_folder

WRITTEN = {"1e400": "1e400", "-1e400": "-1e400", "NaN": "NaN", "deep": "[" * 5000 + "]" * 5000, "long": "9" * 400,
           "longest": "9" * 5000}  # fmt: skip
VALUES = ("x", "", "0", "../x", "\0", [], [1], [[1]], [None], {}, {"a": 1}, None, True, False, 0, 1, 3, -1, -0.5, 1.5,
          1e308, 2**31, 2**63, -(2**63), *({"written": name} for name in WRITTEN))  # fmt: skip
FEW = 250  # of the mutations of a file; all of them are slow


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


def sweep(original, how_many, put_text, use, named):
    """Use each mutation; how many were taken and refused. named: what the message must have."""
    taken = refused = 0
    for text in mutations(original, how_many):
        put_text(text)
        try:
            use()
            taken += 1
        except Exception as error:
            if not isinstance(error, ValueError | FileNotFoundError) or str(named) not in str(error):
                raise AssertionError(f"{error!r} for {text[:3000]}") from error
            refused += 1
    assert taken
    assert refused


@pytest.fixture(scope="module")
def target():
    return tiny_target()


EXTENTS = [FEW, pytest.param(None, marks=pytest.mark.slow)]
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


@pytest.mark.parametrize("how_many", EXTENTS)
@pytest.mark.parametrize("kind", HEADS)
def test_a_heads_config(kind, how_many, target, tmp_path):
    config, tensors = HEADS[kind]
    write(tmp_path, config, tensors)
    known = set()

    def use():
        is_head(tmp_path)
        head = load_head(tmp_path, target)
        if repr(head.config) not in known:
            known.add(repr(head.config))
            assert driven(head, target).shape[0] == len(TEXT) + 1

    how_many = how_many and how_many // 2
    sweep(config, how_many, lambda text: (tmp_path / "config.json").write_text(text, "utf-8"), use, tmp_path)


@pytest.mark.parametrize("how_many", EXTENTS)
def test_an_index(how_many, target, tmp_path):
    folder = write(tmp_path, settings(variant()), official(variant()), INDEX)
    original = json.loads((folder / INDEX).read_text())
    inside = {str(path) for path in folder.glob("*.safetensors")}

    def use():
        where = {place.path for place in places_of_folder(folder).values()}
        assert where <= inside
        load_head(folder, target)

    sweep(original, how_many, lambda text: (folder / INDEX).write_text(text, "utf-8"), use, folder)


def header_of(path):
    """The header of a safetensors file, and all behind it."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def writes_header(path, behind):
    def put_text(text):
        header = text.encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + behind)

    return put_text


@pytest.mark.parametrize("how_many", EXTENTS)
@pytest.mark.parametrize("kind", ["head", "medusa"])
def test_a_header_of_safetensors(kind, how_many, target, tmp_path):
    if kind == "head":
        path, load = write(tmp_path, *HEADS["official"]) / "model.safetensors", load_head
    else:
        name, load = "medusa_lm_head.safetensors", load_medusa
        path = write_medusa(tmp_path, published(target), name) / name
    header, behind = header_of(path)

    def use():
        for place in places_in(path).values():
            assert 8 < place.begin <= place.end <= path.stat().st_size
        load(tmp_path, target)

    sweep(header, how_many, writes_header(path, behind), use, tmp_path)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 100, -1, -100])
def test_a_file_of_weights_that_is_cut_off(length, target, tmp_path):
    path = write(tmp_path, settings(variant(), architectures=None), official(variant())) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    uses = [places_in, lambda path: places_of_folder(path.parent), lambda path: is_head(path.parent),
            lambda path: load_head(path.parent, target)]  # fmt: skip
    for use in uses:
        with pytest.raises(ValueError, match=re.escape(str(path))):
            use(path)


STRANGE = {
    "a number": {"fc.weight": torch.tensor(1.0)},
    "nothing": {"d2t": torch.zeros(0, dtype=torch.long)},
    "complex": {"d2t": torch.zeros(24, dtype=torch.complex64)},
    "a far layer": {"layers.999999999.mlp.up_proj.weight": torch.zeros(24, 16)},
    "a longer number": {"layers." + "9" * 5000 + ".mlp.up_proj.weight": torch.zeros(24, 16)},
    "a far layer, a scalar": {"layers.7.mlp.up_proj.weight": torch.tensor(1.0)},
}


@pytest.mark.parametrize("more", STRANGE.values(), ids=STRANGE)
def test_strange_tensors_of_a_head_are_refused_at_once(more, target, tmp_path):
    config, tensors = HEADS["official"]
    write(tmp_path, config, tensors | more)
    with pytest.raises(ValueError, match=r"head|in '") as caught:
        load_head(tmp_path, target)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("more", [
    {"999999999.0.weight": torch.zeros(40, 16)}, {"0.0.linear.weight": torch.tensor(1.0)},
    {"9" * 5000 + ".0.weight": torch.zeros(40, 16)}, {7: torch.zeros(40, 16)},
    {"0.0.linear.bias": torch.zeros(16).to_sparse()}, {"0.0.linear.bias": torch.zeros(16, device="meta")},
])  # fmt: skip
def test_strange_tensors_of_medusa_heads_are_refused_at_once(more, target, tmp_path):
    for tensors in (published(target) | more, more):
        write_medusa(tmp_path, tensors)
        with pytest.raises(ValueError, match=r"eads|in '") as caught:
            load_medusa(tmp_path, target)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("how_many", EXTENTS)
def test_a_profile(how_many, tmp_path):
    first = replace(
        counts([[700, 100], [600, 80]]),
        moments=[[100.0, 60.0, 40.0, 70.0, 45.0], [60.0, 10.0, 3.0, 12.0, 4.0]],
    )
    race = Kind("gumbel", "race", independent_sequences=True)
    profile = profile_of(first, greedy_counts([[80, 10]], [100]), counts([[80, 10]], 100, 1.0, race))
    path = tmp_path / "profile.json"
    profile.save(path)
    ways = [
        (method, Filters(heat)) for method in ("sequoia", "chain", "dyspec", "rsd-c", "ersd") for heat in (0.0, 1.0)
    ]
    known = set()

    def use():
        loaded = Profile.load(path)
        if repr(loaded) in known:
            return
        known.add(repr(loaded))
        for method, filters in ways:
            if not any(entry.kind == loaded.row(method).kind(filters.temperature) for entry in loaded.acceptance):
                continue
            for batch in (1, 3):
                planned = loaded.plan(method, filters, batch)
                assert planned.plan.speedup > 0
                assert loaded.speedup_error(planned, batch) >= 0
                assert loaded.limit(method, planned, batch).without_that > 0
                assert loaded.mbsu(planned.plan) > 0
                assert loaded.tree_for(method, filters, batch)

    sweep(json.loads(path.read_text()), how_many, lambda text: path.write_text(text, "utf-8"), use, path)


@pytest.mark.parametrize("how_many", EXTENTS)
@pytest.mark.parametrize("line", [0, 1, 2])
def test_a_trace(line, how_many, demo_pair, tmp_path):
    path = tmp_path / "trace"
    decoder = SpeculativeDecoder(*demo_pair[:2], "sequoia", tree_size=6)
    ids = demo_pair[2]("def read", return_tensors="pt").input_ids
    decoder.generate(ids, 6, temperature=0.8, trace=path, tokenizer=demo_pair[2])
    lines = path.read_text().split("\n")
    assert len(lines) > 3

    def put_text(text):
        path.write_text("\n".join([*lines[:line], text, *lines[line + 1 :]]), "utf-8")

    sweep(json.loads(lines[line]), how_many, put_text, lambda: trace_page(*read_trace(path)), path)
