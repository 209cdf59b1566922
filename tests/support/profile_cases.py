"""Helpers of tests/options/test_profile.py and its neighbours."""

import torch
from tiny_models import tiny_llama

from heavypath.kernels.filtering import Filters
from heavypath.speculative import METHODS, Profile
from heavypath.speculative.costs.measured import CostsByBatch
from heavypath.speculative.costs.table import Costs
from heavypath.speculative.profile import MeasuredAcceptance
from heavypath.speculative.walking import Way


def constant_llama(logits):
    """A model whose next token has the same law after any text."""
    model = tiny_llama(0, len(logits))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.fill_(1.0)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.copy_(torch.tensor(logits)[:, None].expand(-1, 16) / 16)
    return model


def way_of(row, temperature=1.0):
    """The way of a method, with three sequences if they are independent."""
    return Way(*row.at(temperature), 3 if row.independent_sequences else None)


ACCEPTED = [[500, 150, 60], [480, 120, 70], [450, 100, 60], [450, 100, 60]]  # of 1000, by level and child
REJECTION = Way("without_replacement", "without_replacement", None)
WAYS = sorted(
    {way_of(method) for name, method in METHODS.items() if name != "autoregressive" and method.is_lossless}, key=str
)


def counts(accepted, reached=1000, temperature=1.0, way=REJECTION):
    """What may have been counted, as many children being offered as there are columns."""
    return MeasuredAcceptance(
        draw=way.draw, verification=way.verification, sequence_count=way.sequence_count, filters=Filters(temperature),
        accepted=accepted, reached=[reached] * len(accepted), moments=[[0.0] * 5] * len(accepted[0]),
    )  # fmt: skip


def greedy_counts(accepted, reached, sequence_count=None):
    return MeasuredAcceptance("top_k", "greedy", sequence_count, Filters(0.0), accepted, reached, [])


def profile_of(*acceptance, step=None, level=0.001):
    return Profile(
        target="a target", draft="a draft", target_parameters=1000, draft_parameters=50,
        environment={"dtype": "float32", "device_type": "cpu"}, acceptance=acceptance, verifier="rejection",
        costs=CostsByBatch({1: Costs(step or {1: 0.01, 4: 0.012, 16: 0.03}, level)}),
    )  # fmt: skip
