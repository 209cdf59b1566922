"""How a decoder's method draws and verifies: its row of the table, with the options that the decoder was given."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from heavypath.kernels.filtering import Filters
from heavypath.kernels.nodes import Nodes, Verified
from heavypath.kernels.noise import Noise
from heavypath.kernels.typical.acceptance import Typical, typical_unchecked
from heavypath.speculative.decoding.growing import VALUE_TEMPERATURE
from heavypath.speculative.decoding.own_verifier import OwnVerifier
from heavypath.speculative.decoding.processing import Processing
from heavypath.speculative.decoding.rules import OWN, Rules, Verifier
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.methods import Method, check_independent, row_of


@dataclass(frozen=True)
class TypicalVerifier:
    """A `Verifier` that takes what the target finds likely enough."""

    typical: Typical

    @property
    def law_changed_by(self) -> str:
        """In words."""
        return f"typical acceptance, epsilon {self.typical.epsilon:g}, delta {self.typical.delta:g}"

    def __call__(
        self, nodes: Nodes, target_logits: Tensor, draft_logits: Tensor | None, *, max_depth: int,
        target_filters: Filters, draft_filters: Filters, noise: Noise,
    ) -> Verified:  # fmt: skip
        """See `Verifier`; the draft is not asked."""
        return typical_unchecked(
            nodes, target_logits, typical=self.typical, max_depth=max_depth, filters=target_filters, noise=noise
        )


class MethodRules:
    """The rules of one decoder.

    row: of the method, verified as was asked for; own_verifier: a verifier of the user's own, or None

    Raises TypeError or ValueError for options that the method does not have, or that do not fit each other.
    """

    def __init__(
        self,
        method: str,
        verifier: Verifier | str | None,
        epsilon: float | None,
        delta: float | None,
        draft_options: dict[str, Any],
    ):
        """draft_options: temperature, top_k, top_p and min_p of the draft; None for the target's."""
        self._method, self._draft_options = method, draft_options
        self.row = row_of(method, verifier if isinstance(verifier, str) else None)
        typical = self.row.typical(epsilon, delta)
        self._typical_verifier = None if typical is None else TypicalVerifier(typical)
        self.draft_filters(Filters()).check("draft_")
        self.own_verifier = None if verifier is None or isinstance(verifier, str) else OwnVerifier(verifier)
        if typical is not None and self.own_verifier is not None:
            raise ValueError(
                f"{method!r} is its verification; with a verifier of your own give another method, as 'top-k'"
            )

    def verified_by(self, verifier: str | None) -> Method:
        """Have another verifier, where none was given; the row that is in force then."""
        self.row = self.row.verified_by(verifier)
        return self.row

    def draft_filters(self, target: Filters) -> Filters:
        """The draft's filters. Greedy text needs the draft's likeliest tokens, which is what temperature 0 draws."""
        filters = target.override(**self._draft_options)
        return filters if target.temperature > 0 else filters._replace(temperature=0.0)

    def of(self, filters: Filters, draft: Draft | None, processing: Processing | None, *, masked: bool) -> Rules:
        """The rules where the target is sampled so; ValueError where the method cannot sample so.

        masked: whether logits processors may leave tokens out
        """
        draft_filters = self.draft_filters(filters)
        kind = self.row.kind(filters.temperature, draft_filters.temperature)
        verification = kind.verification if self.own_verifier is None else OWN
        if draft_filters.temperature == 0:
            check_independent(self._method, verification, draft)
        return Rules(
            replacement=kind.replacement,
            # A draft without a model that proposes few tokens means it: random ones beside them would be rejected. So
            # would be those that logits processors left out.
            fill=self.row.fill and draft is not None and draft.proposes_every_token and not masked,
            verification=verification,
            target_filters=filters,
            draft_filters=draft_filters,
            drawing_filters=kind.drawing_filters(draft_filters),
            value_temperature=self._draft_options["temperature"] or VALUE_TEMPERATURE,
            changes=() if processing is None else (processing,),
            verifier=self._typical_verifier if verification == "typical" else self.own_verifier,
        )
