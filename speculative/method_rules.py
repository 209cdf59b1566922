"""Rules of a decoder's method: its row of the table, with the options that the decoder was given."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from heavypath.kernels.filtering import Filters
from heavypath.speculative.decoding.rules import OWN, Rules
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.methods import Method, check_independent, row_of
from heavypath.speculative.trees.growth import VALUE_TEMPERATURE

if TYPE_CHECKING:
    from heavypath.speculative.decoding.request import Request
    from heavypath.speculative.profile import Profile


class MethodRules:
    """The rules of one decoder.

    row: of the method, verified as was asked for; own_verifier: a verifier of the user's own, or None

    Raises TypeError or ValueError for options that the method does not have, or that do not fit each other.
    """

    def __init__(self, method: str, options: Mapping[str, Any]):
        """options: of `RuleOptions`; others are not looked at."""
        self._method, verifier = method, options.get("verifier")
        self._draft_options = {name: options.get(f"draft_{name}") for name in Filters._fields}
        self.row = row_of(method, verifier if isinstance(verifier, str) else None)
        typical = self.row.typical(options.get("epsilon"), options.get("delta"))
        self._typical_verifier = None if typical is None else verifier_of(typical)
        self.draft_filters(Filters()).check("draft_")
        self.own_verifier = None if verifier is None or isinstance(verifier, str) else verifier_of(verifier)
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

    def of(self, request: "Request", draft: Draft | None, profile: "Profile | None") -> Rules:
        """The rules of a request, drawn as the profile was measured; ValueError where the method cannot sample so."""
        filters, draft_filters = request.filters, self.draft_filters(request.filters)
        kind = self.row.kind(filters.temperature, draft_filters.temperature)
        verification = kind.verification if self.own_verifier is None else OWN
        if draft_filters.temperature == 0:
            check_independent(self._method, verification, draft)
        changes = () if profile is None or draft is None else profile.changes(self._method, filters)
        return Rules(
            replacement=kind.replacement,
            # A draft without a model that proposes few tokens means it: random ones beside them would be rejected. So
            # would be those that logits processors left out.
            fill=self.row.fill and draft is not None and draft.proposes_every_token and request.processors is None,
            verification=verification,
            target_filters=filters,
            draft_filters=draft_filters,
            drawing_filters=kind.drawing_filters(draft_filters),
            value_temperature=self._draft_options["temperature"] or VALUE_TEMPERATURE,
            changes=changes if request.processing is None else (*changes, request.processing),
            verifier=self._typical_verifier if verification == "typical" else self.own_verifier,
        )


def verifier_of(given: Any) -> Any:
    """The function that is called in the place of `verify_tree`, of a user's own verifier or a `Typical`."""
    from heavypath.kernels.typical.acceptance import Typical
    from heavypath.speculative.decoding.verifiers import OwnVerifier, TypicalVerifier

    return TypicalVerifier(given) if isinstance(given, Typical) else OwnVerifier(given)
