"""Tree speculative decoding for Hugging Face models.

Importing it registers attn_implementation="heavypath" with transformers. A public name is imported at its first use, so
that a program loads only the modules that it needs.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from heavypath.speculative.names import PUBLIC, load
from heavypath.speculative.waiting import is_command, wait_passively

if TYPE_CHECKING:  # the public names for type checkers and editors; at run time `names.PUBLIC` has them
    from heavypath.kernels.nodes import Verified as Verified
    from heavypath.kernels.verifying.top_down import top_down as top_down
    from heavypath.speculative.calibration import calibrate as calibrate
    from heavypath.speculative.comparison import compare as compare
    from heavypath.speculative.decoder import SpeculativeDecoder as SpeculativeDecoder
    from heavypath.speculative.decoding.rules import Verifier as Verifier
    from heavypath.speculative.decoding.statistics import Statistics as Statistics
    from heavypath.speculative.demo import load_demo_head as load_demo_head
    from heavypath.speculative.demo import load_demo_pair as load_demo_pair
    from heavypath.speculative.distillation import distil as distil
    from heavypath.speculative.drafts.blocks.head import BlockHead as BlockHead
    from heavypath.speculative.drafts.blocks.kinds import BLOCK_TERMS as BLOCK_TERMS
    from heavypath.speculative.drafts.blocks.pard import Pard as Pard
    from heavypath.speculative.drafts.blocks.term import BlockTerm as BlockTerm
    from heavypath.speculative.drafts.composite import Cascade as Cascade
    from heavypath.speculative.drafts.composite import Mixture as Mixture
    from heavypath.speculative.drafts.draft import Draft as Draft
    from heavypath.speculative.drafts.draft import Feed as Feed
    from heavypath.speculative.drafts.heads.eagle import EagleHead as EagleHead
    from heavypath.speculative.drafts.lookahead import Lookahead as Lookahead
    from heavypath.speculative.drafts.lookup import PromptLookup as PromptLookup
    from heavypath.speculative.drafts.medusa.heads import MedusaHeads as MedusaHeads
    from heavypath.speculative.drafts.merge import Merge as Merge
    from heavypath.speculative.drafts.model import EarlyExit as EarlyExit
    from heavypath.speculative.drafts.recall import Recall as Recall
    from heavypath.speculative.drafts.retrieval import Retrieval as Retrieval
    from heavypath.speculative.drafts.translated import Translated as Translated
    from heavypath.speculative.layer_choice import LayerChoice as LayerChoice
    from heavypath.speculative.layer_choice import choose_layers as choose_layers
    from heavypath.speculative.loading import load_draft as load_draft
    from heavypath.speculative.loading import load_target as load_target
    from heavypath.speculative.losslessness.chi_square import detectable_total_variation as detectable_total_variation
    from heavypath.speculative.losslessness.goodness_of_fit import Departure as Departure
    from heavypath.speculative.losslessness.goodness_of_fit import GoodnessOfFit as GoodnessOfFit
    from heavypath.speculative.losslessness.goodness_of_fit import check_losslessness as check_losslessness
    from heavypath.speculative.losslessness.goodness_of_fit import goodness_of_fit as goodness_of_fit
    from heavypath.speculative.losslessness.law import joint_law as joint_law
    from heavypath.speculative.losslessness.verification_cases import VERIFICATION_CASES as VERIFICATION_CASES
    from heavypath.speculative.losslessness.verification_fit import check_verification as check_verification
    from heavypath.speculative.methods import LOSSLESS_METHODS as LOSSLESS_METHODS
    from heavypath.speculative.methods import METHODS as METHODS
    from heavypath.speculative.methods import Method as Method
    from heavypath.speculative.models.caches import KeyValueCache as KeyValueCache
    from heavypath.speculative.models.caches import RowCache as RowCache
    from heavypath.speculative.models.forward import Forward as Forward
    from heavypath.speculative.models.forward_of import FORWARDS as FORWARDS
    from heavypath.speculative.models.layer_weights import stream_of as stream_of
    from heavypath.speculative.models.text_cache import TextCache as TextCache
    from heavypath.speculative.output.generation import Generation as Generation
    from heavypath.speculative.output.text_stream import TextStream as TextStream
    from heavypath.speculative.output.trace import read_trace as read_trace
    from heavypath.speculative.processors.grammar import Grammar as Grammar
    from heavypath.speculative.profile import Profile as Profile
    from heavypath.speculative.ranks.agreement import RankMismatchError as RankMismatchError
    from heavypath.speculative.ranks.communication import Communication as Communication
    from heavypath.speculative.ranks.communication import RankFailedError as RankFailedError
    from heavypath.speculative.streaming.load import load_streamed as load_streamed
    from heavypath.speculative.streaming.offloaded import stream_layers as stream_layers
    from heavypath.speculative.streaming.own import stream_from as stream_from
    from heavypath.speculative.streaming.stream import LayerStream as LayerStream
    from heavypath.speculative.suite.measure import compare_suite as compare_suite
    from heavypath.speculative.training.beginnings import draft_of_layers as draft_of_layers
    from heavypath.speculative.training.beginnings import most_frequent as most_frequent
    from heavypath.speculative.training.beginnings import new_block as new_block
    from heavypath.speculative.training.beginnings import new_head as new_head
    from heavypath.speculative.training.documents import read_documents as read_documents
    from heavypath.speculative.training.settings import DistilSettings as DistilSettings
    from heavypath.speculative.tree_policy import TreePolicy as TreePolicy
    from heavypath.speculative.trees.growth import Confidence as Confidence
    from heavypath.speculative.trees.planning import Plan as Plan
    from heavypath.speculative.trees.planning import expected_tokens as expected_tokens
    from heavypath.speculative.trees.planning import greedy_tree as greedy_tree
    from heavypath.speculative.trees.planning import select_tree as select_tree
    from heavypath.speculative.trees.planning import sequoia_tree as sequoia_tree
    from heavypath.speculative.trees.tree import TokenTree as TokenTree

if is_command(sys.argv, sys.orig_argv):
    wait_passively(os.environ)  # before PyTorch is imported, which reads the environment once
else:
    import_module("heavypath.speculative.models.attn_implementation")  # which registers itself


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [*PUBLIC]
    if name not in PUBLIC:
        raise AttributeError(f"module 'heavypath.speculative' has no attribute {name!r}")
    found = load(name)
    globals()[name] = found  # the next time Python finds it without asking here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
