"""Tree speculative decoding for Hugging Face Llama-family models.

Importing this registers attn_implementation="heavypath" with transformers.
"""

from heavypath.speculative import huggingface
from heavypath.speculative.decoder import Generation, SpeculativeDecoder
from heavypath.speculative.demo import load_demo_pair
from heavypath.speculative.drafts import EarlyExit, PromptLookup
from heavypath.speculative.growing import Confidence
from heavypath.speculative.methods import METHODS
from heavypath.speculative.planning import Plan, expected_tokens, greedy_tree, select_tree, sequoia_tree
from heavypath.speculative.profile import Profile
from heavypath.speculative.statistics import Statistics
from heavypath.speculative.tree import TokenTree

huggingface.register()

__all__ = [
    "METHODS",
    "Confidence",
    "EarlyExit",
    "Generation",
    "Plan",
    "Profile",
    "PromptLookup",
    "SpeculativeDecoder",
    "Statistics",
    "TokenTree",
    "expected_tokens",
    "greedy_tree",
    "load_demo_pair",
    "select_tree",
    "sequoia_tree",
]
