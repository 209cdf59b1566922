"""Rounding inside fused kernels, at the points where a 16-bit model rounds between two modules.

Kernels that use it are launched with enable_fp_fusion=False. Otherwise the compiler fuses a rounded product and the
following sum into one multiply-add, which rounds only once. This happens in fp32, too, where `rounded` does nothing.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from heavypath.kernels.language import tl, triton


@triton.jit
def rounded(x, like, INTERPRETED: tl.constexpr):
    """Round fp32 x to the type that `like` points to; the result stays in fp32.

    Triton's interpreter truncates to bfloat16, but a GPU rounds to nearest. So the interpreted kernel rounds here.
    """
    if like.dtype.element_ty == tl.float32:
        return x
    if INTERPRETED and like.dtype.element_ty == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(like.dtype.element_ty).to(tl.float32)
