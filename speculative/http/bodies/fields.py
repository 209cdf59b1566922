"""The base of bodies: nothing but their fields, of their own types; lists of some length; and what is refused."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag


class Body(BaseModel):
    """Nothing but the fields below, of their own types: "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Each = TypeVar("Each")
# What is wrong with the first element is said, and not of each: a body of 1 MiB has room for many.
Several = Annotated[list[Each], Field(max_length=4096, fail_fast=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # as many as a body has room for


def _shape(value: Any) -> str:
    return "|one" if isinstance(value, str) else "|several"


# A string or something else, told apart by what was sent, so that an error speaks of one of the two. Names of such
# kinds begin with |, so that `errors` knows them from those of fields.
OneOrSeveral = Annotated[Annotated[str, Tag("|one")] | Annotated[Several[Each], Tag("|several")], Discriminator(_shape)]


def refused(*allowed: Any) -> AfterValidator:
    """A check of a field that is known and not there. allowed: the values with which it asks for nothing, with None."""

    def refuse(value: Any) -> Any:
        neutral = any(type(value) is type(each) and value == each for each in (None, *allowed))
        if not neutral and not (isinstance(value, float) and value in allowed):
            raise ValueError(f"this server does not have it; leave it out (got {value!r:.80})")
        return value

    return AfterValidator(refuse)


Refused = Annotated[Any, refused()]
