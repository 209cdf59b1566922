"""Tree speculative decoding, as transformers loads it from this folder; see README.md beside it."""

from heavypath import PromptLookup, SpeculativeDecoder


def generate(model, draft=None, method="sequoia", tree_size=None, **arguments):
    """Continue the prompts as `model.generate(**arguments)` does.

    draft: anything that SpeculativeDecoder takes; default: the text itself, by `PromptLookup`
    """
    known, options = getattr(model, "heavypath_decoder", None), (draft, method, tree_size)
    if known is None or known[0] != options:  # the last one is kept with its model: it holds what was prepared
        decoder = SpeculativeDecoder(model, PromptLookup() if draft is None else draft, method, tree_size=tree_size)
        model.heavypath_decoder = known = options, decoder
    return model.generate(**arguments, custom_generate=known[1])
