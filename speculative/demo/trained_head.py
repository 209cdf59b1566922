"""The trained head that ships with the package, for the shipped target."""

from transformers import LlamaForCausalLM

from heavypath.speculative.demo import FOLDER
from heavypath.speculative.drafts.heads.checkpoint import load_head
from heavypath.speculative.drafts.heads.eagle import EagleHead


def load_demo_head(target: LlamaForCausalLM) -> EagleHead:
    """Load the shipped EAGLE-3 head of the shipped target, in the target's dtype and on its device.

    target, _, tokenizer = load_demo_pair()
    decoder = SpeculativeDecoder(target, load_demo_head(target))
    """
    return load_head(FOLDER / "head", target)
