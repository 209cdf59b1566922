"""How far apart two right programs may be that round differently: by the reference's own error, not by one processor's.

A sum of n products in fp32 has an error of about sqrt(n) * 2^-24 times its terms, and at most n * 2^-24 times. Through
the layers of a model these errors grow as much as the weights say, which no simple bound knows. But the reference makes
errors of the same kind on the same way: where it is computed once more in fp64, its distance from that is a sample of
them. Another order of the sums, another vector width or fused multiply-adds are another sample. The largest of many
samples seldom differ by a factor of 2; `TIMES` is 8, and a mistake in an fp32 program is far larger.
"""

import torch

TIMES = 8
UNIT = 2.0**-24  # half the distance of fp32 numbers about 1


def rounding_of(reference, exact):
    """How far a right program in fp32 may be from `exact`, fp64, if `reference` is such a program.

    Where the reference is exact by chance, each number may still be rounded a few times by itself.
    """
    exact = exact.double()
    own = (reference.double() - exact).abs().max()
    return float(TIMES * torch.maximum(own, UNIT * exact.abs().max()))


def assert_rounded(found, reference, exact):
    """`found`, by a program in fp32 or as text, is as near to `exact` as `reference` is, but for other roundings."""
    torch.testing.assert_close(found.double(), exact.double(), rtol=0, atol=rounding_of(reference, exact))


def bound_of_sums(terms, largest=1.0):
    """How far a right program in fp32 may be from one in fp64 whose sums, one after another, have so many terms in all.

    largest: magnitude of the terms. Of the tiny models of the tests a layer has 300 terms or less: 8 to 64 columns in
    each projection, up to 128 inside, and as many keys as the text is long.
    """
    return terms * UNIT * largest


SMALL_MODEL = bound_of_sums(1000)  # of a model or head of at most three such layers, whose logits are about 1
