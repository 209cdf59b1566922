"""The base class of bodies: strict types, no unknown fields, lists of bounded length, and fields that are refused."""

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag


class Body(BaseModel):
    """Base of the objects in request bodies. Unknown fields and values of other types are errors: "5" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True)


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Each = TypeVar("Each")
# Only the first wrong element is reported, because a body of 1 MiB has room for many.
Several = Annotated[list[Each], Field(max_length=4096, fail_fast=True)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]  # limited by the size of the body


def _shape(value: Any) -> str:
    return "|one" if isinstance(value, str) else "|several"


# A string or a list. The type that was sent decides, so that an error message is about one of the two. The tags begin
# with |, so that `errors` can tell them from names of fields.
OneOrSeveral = Annotated[Annotated[str, Tag("|one")] | Annotated[Several[Each], Tag("|several")], Discriminator(_shape)]


def refused(*allowed: Any) -> AfterValidator:
    """Make a validator for a field that is known but not supported. allowed: values that are accepted besides None."""

    def refuse(value: Any) -> Any:
        neutral = any(type(value) is type(each) and value == each for each in (None, *allowed))
        if not neutral and not (isinstance(value, float) and value in allowed):
            raise ValueError(f"this server does not have it; leave it out (got {value!r:.80})")
        return value

    return AfterValidator(refuse)


Refused = Annotated[Any, refused()]
