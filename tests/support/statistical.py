"""Chi-square goodness of fit, as the package has it."""

from heavypath.speculative.losslessness.chi_square import SIGNIFICANCE, chi_square_p_value, joint_counts

__all__ = ["SIGNIFICANCE", "chi_square_p_value", "joint_counts"]
