"""Roundings inside kernels, where a model in 16 bits rounds what one module hands to the next.

Kernels that round so are launched with enable_fp_fusion=False. Otherwise the compiler makes one instruction, which
rounds once, of a rounded product and the sum after it; in fp32, too, where `rounded` does nothing.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from heavypath.kernels.language import tl, triton


@triton.jit
def rounded(x, like, INTERPRETED: tl.constexpr):
    """fp32 x, rounded to the nearest number of the type that `like` points to, still in fp32.

    Triton's interpreter cuts off the low bits for bfloat16, where a GPU rounds; so there they are rounded here.
    """
    if like.dtype.element_ty == tl.float32:
        return x
    if INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(like.dtype.element_ty).to(tl.float32)
