"""Numbers of the papers that results are held against, as printed there."""

# Sequoia (arXiv 2402.12374v3), appendix E: the acceptance of child 1, 2, ... for Llama-3-70B-Instruct drafted for by
# Llama-3-8B-Instruct on CNN daily news. It does not fall at children 21, 25, 26 and 30.
APPENDIX_E = [
    0.7732, 0.1039, 0.0402, 0.0206, 0.0128, 0.0081, 0.0064, 0.0043, 0.0035, 0.0026, 0.0025, 0.0021, 0.0016, 0.0014,
    0.0010, 0.0010, 0.0010, 0.0007, 0.0007, 0.0006, 0.0007, 0.0006, 0.0004, 0.0004, 0.0005, 0.0006, 0.0004, 0.0003,
    0.0002, 0.0004, 0.0001,
]  # fmt: skip

# Sequoia, table 1, Llama-2-7B drafted by JF68M on an A100: (nodes, levels), speed-up and tokens of a step.
TABLE_1 = {
    "C4, T = 0": ((128, 10), 4.04, 5.08), "C4, T = 0.6": ((128, 7), 3.18, 3.92),
    "OpenWebText, T = 0": ((128, 7), 3.22, 3.86), "OpenWebText, T = 0.6": ((128, 6), 2.71, 3.33),
    "CNN, T = 0": ((128, 7), 3.41, 4.05), "CNN, T = 0.6": ((128, 6), 2.83, 3.45),
    "MT-Bench, T = 0": ((128, 10), 4.03, 4.98), "MT-Bench, T = 0.6": ((128, 7), 3.18, 3.96),
}  # fmt: skip
DRAFT_MS, TARGET_MS = 0.5, 24.2  # a token of JF68M, and one of Llama-2-7B, by the paper


def time_of(nodes: int) -> float:
    """t(n) that table 1 implies, in tokens of plain decoding: a line through 1 and the mean of its rows at 128."""
    implied = [tokens / speedup - levels * DRAFT_MS / TARGET_MS for (_, levels), speedup, tokens in TABLE_1.values()]
    return 1 + (sum(implied) / len(implied) - 1) * (nodes - 1) / 127


# DySpec (arXiv 2410.11744), 64 nodes, table 3, and 768 nodes, table 4: Llama-2-70B on an A100. Seconds of a token
# without a tree, by text.
PLAIN_SECONDS = {
    "C4, T = 0": 5.59650, "C4, T = 0.6": 5.34781, "OpenWebText, T = 0": 5.52462,
    "OpenWebText, T = 0.6": 5.30340, "CNN, T = 0": 5.31049, "CNN, T = 0.6": 5.29280,
}  # fmt: skip
TABLE_4 = {  # seconds of a token and tokens of a step: DySpec, Sequoia
    "C4, T = 0": ((0.42412, 16.04), (0.62841, 9.40)),
    "C4, T = 0.6": ((0.88494, 7.14), (0.66293, 8.96)),
    "OpenWebText, T = 0": ((0.54885, 11.79), (0.62979, 9.81)),
    "OpenWebText, T = 0.6": ((0.81002, 7.66), (0.65147, 9.12)),
    "CNN, T = 0": ((0.54739, 11.46), (0.60206, 9.54)),
    "CNN, T = 0.6": ((0.87648, 7.02), (0.65835, 8.80)),
}
# Times as fast as without a tree, and tokens of a step: DySpec, Sequoia, SpecInfer. DySpec on C4 is from the seconds of
# the arXiv text, 0.53696 and 0.78912; the other rows are rounded as in the version under review.
TABLE_3 = {
    "C4, T = 0": ((10.42, 9.10), (6.29, 6.08), (4.89, 4.67)),
    "C4, T = 0.6": ((6.78, 6.21), (5.66, 5.72), (5.76, 5.75)),
    "OpenWebText, T = 0": ((7.07, 7.23), (6.02, 6.41), (5.07, 4.88)),
    "OpenWebText, T = 0.6": ((6.05, 6.77), (5.63, 6.07), (5.42, 5.46)),
    "CNN, T = 0": ((6.50, 6.93), (5.85, 6.42), (4.80, 4.83)),
    "CNN, T = 0.6": ((5.94, 6.95), (5.71, 6.07), (5.70, 5.75)),
}
BLOCKS_9 = {768: (366, 218), 1024: (580, 296)}  # figure 9: blocks of real trees, before and after reordering
BLOCKS_5 = {256: (36, 22.5), 512: (135.5, 52.8), 1024: (490.2, 119.3), 2048: (1654.5, 278.7)}  # table 5: random trees
