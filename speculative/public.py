"""All public names of `heavypath.speculative`, which that imports when one of them is asked for."""

from heavypath.kernels.nodes import Verified
from heavypath.kernels.verifying.top_down import top_down
from heavypath.speculative.calibration import calibrate
from heavypath.speculative.comparison import compare
from heavypath.speculative.decoder import SpeculativeDecoder
from heavypath.speculative.decoding.rules import Verifier
from heavypath.speculative.decoding.statistics import Statistics
from heavypath.speculative.demo import load_demo_head, load_demo_pair
from heavypath.speculative.distillation import distil
from heavypath.speculative.drafts.blocks.head import BlockHead
from heavypath.speculative.drafts.blocks.pard import Pard
from heavypath.speculative.drafts.composite import Cascade, Mixture
from heavypath.speculative.drafts.draft import Draft, Feed
from heavypath.speculative.drafts.heads.eagle import EagleHead
from heavypath.speculative.drafts.lookahead import Lookahead
from heavypath.speculative.drafts.lookup import PromptLookup
from heavypath.speculative.drafts.medusa.heads import MedusaHeads
from heavypath.speculative.drafts.merge import Merge
from heavypath.speculative.drafts.model import EarlyExit
from heavypath.speculative.drafts.recall import Recall
from heavypath.speculative.drafts.retrieval import Retrieval
from heavypath.speculative.drafts.translated import Translated
from heavypath.speculative.layer_choice import LayerChoice, choose_layers
from heavypath.speculative.loading import load_draft
from heavypath.speculative.losslessness.chi_square import detectable_total_variation
from heavypath.speculative.losslessness.goodness_of_fit import (
    Departure,
    GoodnessOfFit,
    check_losslessness,
    goodness_of_fit,
)
from heavypath.speculative.losslessness.law import joint_law
from heavypath.speculative.methods import LOSSLESS_METHODS, METHODS, Method
from heavypath.speculative.models import attn_implementation  # noqa: F401 - which registers itself
from heavypath.speculative.models.caches import RowCache
from heavypath.speculative.models.layer_weights import stream_of
from heavypath.speculative.models.text_cache import TextCache
from heavypath.speculative.output.generation import Generation
from heavypath.speculative.output.text_stream import TextStream
from heavypath.speculative.output.trace import read_trace
from heavypath.speculative.processors.grammar import Grammar
from heavypath.speculative.profile import Profile
from heavypath.speculative.ranks.agreement import RankMismatchError
from heavypath.speculative.ranks.group import RankFailedError
from heavypath.speculative.streaming.load import load_streamed
from heavypath.speculative.streaming.offloaded import stream_layers
from heavypath.speculative.streaming.stream import LayerStream
from heavypath.speculative.training.beginnings import draft_of_layers, most_frequent, new_block, new_head
from heavypath.speculative.training.documents import read_documents
from heavypath.speculative.training.settings import DistilSettings
from heavypath.speculative.trees.growth import Confidence
from heavypath.speculative.trees.planning import Plan, expected_tokens, greedy_tree, select_tree, sequoia_tree
from heavypath.speculative.trees.tree import TokenTree

__all__ = [
    "LOSSLESS_METHODS",
    "METHODS",
    "BlockHead",
    "Cascade",
    "Confidence",
    "Departure",
    "DistilSettings",
    "Draft",
    "EagleHead",
    "EarlyExit",
    "Feed",
    "Generation",
    "GoodnessOfFit",
    "Grammar",
    "LayerChoice",
    "LayerStream",
    "Lookahead",
    "MedusaHeads",
    "Merge",
    "Method",
    "Mixture",
    "Pard",
    "Plan",
    "Profile",
    "PromptLookup",
    "RankFailedError",
    "RankMismatchError",
    "Recall",
    "Retrieval",
    "RowCache",
    "SpeculativeDecoder",
    "Statistics",
    "TextCache",
    "TextStream",
    "TokenTree",
    "Translated",
    "Verified",
    "Verifier",
    "calibrate",
    "check_losslessness",
    "choose_layers",
    "compare",
    "detectable_total_variation",
    "distil",
    "draft_of_layers",
    "expected_tokens",
    "goodness_of_fit",
    "greedy_tree",
    "joint_law",
    "load_demo_head",
    "load_demo_pair",
    "load_draft",
    "load_streamed",
    "most_frequent",
    "new_block",
    "new_head",
    "read_documents",
    "read_trace",
    "select_tree",
    "sequoia_tree",
    "stream_layers",
    "stream_of",
    "top_down",
]
