"""Short programs to start from, each for one use: `python -m heavypath.speculative.examples.NAME`.

compare_methods: all methods on prompts of one's own, as a table and a plot
own_tree:        a tree of one's own, what is expected of it and what it gives
kinds_of_draft:  what can draft: a model, the text itself, or the target's first layers
own_draft:       a draft of one's own, a table of bigrams
own_verifier:    a verification of one's own, in plain PyTorch
losslessness:    whether a sampler follows its target's law, and where it does not
own_method:      a method of one's own: a tree, how it is drawn, and a rule for one node
constrained:     JSON of a schema, a pattern, and a rule for logits of one's own
batch_streaming: several prompts at once, each streamed as it grows
serving:         requests that come while others are decoded, in asyncio
tensor_parallel: a target split over processes by torchrun
ray_serve:       replicas of the HTTP server by Ray Serve
chat:            a conversation with a model that has a chat template

`hub/` is a folder for the Hugging Face Hub, from which transformers' `generate(custom_generate=...)` decodes by trees.
All of them run offline on a CPU with the shipped pair. Those that take models of one's own have `--models TARGET DRAFT`
and `--device cuda` for a GPU.
"""
