"""Rules of a decoder's method: its row of the table, with the options that the decoder was given."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from heavypath.kernels.filtering import Filters
from heavypath.speculative.decoding.rules import OWN, VALUE_TEMPERATURE, Rules
from heavypath.speculative.drafts.draft import Draft
from heavypath.speculative.methods import Method, check_independent, row_of

if TYPE_CHECKING:
    from heavypath.speculative.decoding.request import Request
    from heavypath.speculative.profile import Profile


def asked_row(method: str, options: Mapping[str, Any]) -> Method:
    """The row of a method, verified as was asked for; options: of `RuleOptions`, others are not looked at.

    Raises TypeError or ValueError for options that the method does not have, or that do not fit each other.
    """
    verifier = options.get("verifier")
    row = row_of(method, verifier if isinstance(verifier, str) else None)
    limits = {name: options[name] for name in ("epsilon", "delta") if options.get(name) is not None}
    if limits and row.verification != "typical":
        raise ValueError(f"{' and '.join(limits)} are options of typical acceptance, method 'typical-lossy'")
    draft_filters_of(options, Filters()).check("draft_")
    own = row.verifier if verifier is None or isinstance(verifier, str) else verifier
    if own is None and row.verification == "typical":
        from heavypath.speculative.decoding.typical import Typical

        return replace(row, verifier=Typical(**limits).check())
    if own is None:
        return row
    from heavypath.speculative.decoding.verifiers import checked

    own = checked(own)
    if row.verification == "typical":
        raise ValueError(f"{method!r} is its verification; with a verifier of your own give another method, as 'top-k'")
    return replace(row, verification=OWN, verifier=own)


def draft_filters_of(options: Mapping[str, Any], target: Filters) -> Filters:
    """The draft's filters. Greedy text needs the draft's likeliest tokens, which is what temperature 0 draws."""
    filters = target.override(**{name: options.get(f"draft_{name}") for name in Filters._fields})
    return filters if target.temperature > 0 else filters._replace(temperature=0.0)


def rules_of(
    method: str, row: Method, options: Mapping[str, Any], request: "Request", draft: Draft | None,
    profile: "Profile | None",
) -> Rules:  # fmt: skip
    """The rules of a request, drawn as the profile was measured; ValueError where the method cannot sample so."""
    filters, draft_filters = request.filters, draft_filters_of(options, request.filters)
    draw, verification = row.at(filters.temperature, draft_filters.temperature)
    if draft_filters.temperature == 0:
        check_independent(method, verification)
    changes = () if profile is None or draft is None else profile.changes(method, filters)
    rules = Rules(
        draw,
        verification,
        filters,
        draft_filters,
        # A draft without a model that proposes few tokens means it, and so does a model beyond its positions: random
        # ones beside them would be rejected. So would be those that logits processors left out.
        fill=row.fill and draft is not None and draft.proposes_all(request.most_tokens) and request.processors is None,
        value_temperature=options.get("draft_temperature") or VALUE_TEMPERATURE,
        changes=changes if request.processing is None else (*changes, request.processing),
        verifier=None if verification == "greedy" else row.verifier,
    )
    return rules if draft is None else draft.rules(rules)
