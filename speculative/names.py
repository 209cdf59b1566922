"""Lazy imports: the module of each public name, and of each optional feature of the decoder's core.

The core imports no optional feature. It calls `load` with its name where a call uses it.
"""

import sys
from importlib import import_module
from typing import Any

PUBLIC = {
    "BLOCK_TERMS": "heavypath.speculative.drafts.blocks.kinds",
    "FORWARDS": "heavypath.speculative.models.forward_of",
    "LOSSLESS_METHODS": "heavypath.speculative.methods",
    "METHODS": "heavypath.speculative.methods",
    "BlockHead": "heavypath.speculative.drafts.blocks.head",
    "BlockTerm": "heavypath.speculative.drafts.blocks.term",
    "Cascade": "heavypath.speculative.drafts.composite",
    "Communication": "heavypath.speculative.ranks.communication",
    "Confidence": "heavypath.speculative.trees.growth",
    "Departure": "heavypath.speculative.losslessness.goodness_of_fit",
    "DistilSettings": "heavypath.speculative.training.settings",
    "Draft": "heavypath.speculative.drafts.draft",
    "EagleHead": "heavypath.speculative.drafts.heads.eagle",
    "EarlyExit": "heavypath.speculative.drafts.model",
    "Feed": "heavypath.speculative.drafts.draft",
    "Forward": "heavypath.speculative.models.forward",
    "Generation": "heavypath.speculative.output.generation",
    "GoodnessOfFit": "heavypath.speculative.losslessness.goodness_of_fit",
    "Grammar": "heavypath.speculative.processors.grammar",
    "KeyValueCache": "heavypath.speculative.models.caches",
    "LayerChoice": "heavypath.speculative.layer_choice",
    "LayerStream": "heavypath.speculative.streaming.stream",
    "Lookahead": "heavypath.speculative.drafts.lookahead",
    "MedusaHeads": "heavypath.speculative.drafts.medusa.heads",
    "Merge": "heavypath.speculative.drafts.merge",
    "Method": "heavypath.speculative.methods",
    "Mixture": "heavypath.speculative.drafts.composite",
    "Pard": "heavypath.speculative.drafts.blocks.pard",
    "Plan": "heavypath.speculative.trees.planning",
    "Profile": "heavypath.speculative.profile",
    "PromptLookup": "heavypath.speculative.drafts.lookup",
    "RankFailedError": "heavypath.speculative.ranks.communication",
    "RankMismatchError": "heavypath.speculative.ranks.agreement",
    "Recall": "heavypath.speculative.drafts.recall",
    "Retrieval": "heavypath.speculative.drafts.retrieval",
    "RowCache": "heavypath.speculative.models.caches",
    "SpeculativeDecoder": "heavypath.speculative.decoder",
    "Statistics": "heavypath.speculative.decoding.statistics",
    "TextCache": "heavypath.speculative.models.text_cache",
    "TextStream": "heavypath.speculative.output.text_stream",
    "TokenTree": "heavypath.speculative.trees.tree",
    "Translated": "heavypath.speculative.drafts.translated",
    "TreePolicy": "heavypath.speculative.tree_policy",
    "VERIFICATION_CASES": "heavypath.speculative.losslessness.verification_cases",
    "Verified": "heavypath.kernels.nodes",
    "Verifier": "heavypath.speculative.decoding.rules",
    "calibrate": "heavypath.speculative.calibration",
    "check_losslessness": "heavypath.speculative.losslessness.goodness_of_fit",
    "check_verification": "heavypath.speculative.losslessness.verification_fit",
    "choose_layers": "heavypath.speculative.layer_choice",
    "compare": "heavypath.speculative.comparison",
    "compare_suite": "heavypath.speculative.suite.measure",
    "detectable_total_variation": "heavypath.speculative.losslessness.chi_square",
    "distil": "heavypath.speculative.distillation",
    "draft_of_layers": "heavypath.speculative.training.beginnings",
    "expected_tokens": "heavypath.speculative.trees.planning",
    "goodness_of_fit": "heavypath.speculative.losslessness.goodness_of_fit",
    "greedy_tree": "heavypath.speculative.trees.planning",
    "joint_law": "heavypath.speculative.losslessness.law",
    "load_demo_head": "heavypath.speculative.demo.trained_head",
    "load_demo_pair": "heavypath.speculative.demo",
    "load_draft": "heavypath.speculative.loading",
    "load_pair": "heavypath.speculative.loading",
    "load_streamed": "heavypath.speculative.streaming.load",
    "load_target": "heavypath.speculative.loading",
    "most_frequent": "heavypath.speculative.training.beginnings",
    "new_block": "heavypath.speculative.training.beginnings",
    "new_head": "heavypath.speculative.training.beginnings",
    "new_medusa": "heavypath.speculative.training.beginnings",
    "read_documents": "heavypath.speculative.training.documents",
    "read_trace": "heavypath.speculative.output.trace",
    "select_tree": "heavypath.speculative.trees.planning",
    "sequoia_tree": "heavypath.speculative.trees.planning",
    "stream_from": "heavypath.speculative.streaming.own",
    "stream_layers": "heavypath.speculative.streaming.offloaded",
    "stream_of": "heavypath.speculative.models.layer_weights",
    "top_down": "heavypath.kernels.verifying.top_down",
}
FEATURES = {
    "Adapting": "heavypath.speculative.adapting",
    "agreement_of": "heavypath.speculative.ranks.agreement",
    "checked_verifier": "heavypath.speculative.decoding.verifiers",
    "Device": "heavypath.speculative.costs.roofline",
    "CudaGraphs": "heavypath.speculative.decoding.graphs",
    "GenerateCall": "heavypath.speculative.custom_generate",
    "growing_drafter": "heavypath.speculative.decoding.growing",
    "inputs_of": "heavypath.speculative.models.prompt_inputs",
    "ProcessedSteps": "heavypath.speculative.processors.steps",
    "Joining": "heavypath.speculative.models.joined",
    "Processing": "heavypath.speculative.decoding.processing",
    "profile_of": "heavypath.speculative.tree_by_profile",
    "recurrent_forward": "heavypath.speculative.models.recurrent.qwen",
    "registered_forward": "heavypath.speculative.models.registered",
    "request_ahead": "heavypath.speculative.models.ahead",
    "Rest": "heavypath.speculative.adapting",
    "serve": "heavypath.speculative.serving.opening",
    "shards_of": "heavypath.speculative.ranks.shards",
    "stopping_of": "heavypath.speculative.processors.stopping",
    "streamed_bytes": "heavypath.speculative.costs.streamed",
    "attention_to": "heavypath.speculative.costs.gpu_step",
    "estimated_costs": "heavypath.speculative.costs.gpu_step",
    "streamed_costs": "heavypath.speculative.costs.streamed",
    "streamed_if_offloaded": "heavypath.speculative.streaming.offloaded",
    "TransformersForward": "heavypath.speculative.models.generic",
    "TreeByProfile": "heavypath.speculative.tree_by_profile",
    "Typical": "heavypath.speculative.decoding.typical",
    "warm_up": "heavypath.speculative.decoding.graphs",
    "watching": "heavypath.speculative.output.watchers",
    "with_processors": "heavypath.speculative.processors.settings",
}
# Draft classes whose conversion (`kinds.as_draft`) is registered in another module than their own: that module.
DRAFTS = {
    "BlockHead": "heavypath.speculative.drafts.trained",
    "EagleHead": "heavypath.speculative.drafts.trained",
    "MedusaHeads": "heavypath.speculative.drafts.trained",
    "MtpHead": "heavypath.speculative.drafts.trained",
}


def load(name: str) -> Any:
    """The object with a name of PUBLIC or FEATURES; its module is imported on first use."""
    return getattr(import_module(PUBLIC.get(name) or FEATURES[name]), name)


def load_kind(given: object) -> bool:
    """Import the module that DRAFTS names for the class of a draft. Returns False if there is none, or it was imported
    before.
    """
    for kind in type(given).__mro__:
        module = DRAFTS.get(kind.__name__) if kind.__module__.startswith("heavypath.") else None
        if module is not None and module not in sys.modules:
            import_module(module)
            return True
    return False
