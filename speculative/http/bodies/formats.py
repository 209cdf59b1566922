"""Structured output: `response_format` of OpenAI's API, `structured_outputs` and `guided_*` of vLLM's."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from heavypath.speculative.http.bodies.fields import Body


class JsonSchema(Body):
    """A named schema, as OpenAI's clients send it. It is always followed strictly."""

    name: str
    definition: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("expected json_schema where the type is 'json_schema', and only there")
        return self


# As an object, or as JSON text.
Schema = Annotated[
    Annotated[str, Tag("|text")] | Annotated[dict[str, Any], Tag("|object")],
    Discriminator(lambda value: "|text" if isinstance(value, str) else "|object"),
]
Choices = Annotated[list[str], Field(min_length=1, max_length=1024, fail_fast=True)]


class StructuredOutputs(Body):
    """Exactly one of: JSON that follows a schema, text that matches a regex, one of several texts, or a JSON object."""

    json_: Schema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        given = (self.json_, self.regex, self.choice, self.json_object or None)
        if sum(each is not None for each in given) != 1:
            raise ValueError("expected one of json, regex, choice and json_object")
        return self


class Formatted(Body):
    """The fields of a request by which its texts must have a form; at most one of them may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None

    def wanted(self) -> tuple[str, StructuredOutputs] | None:
        """The name of the field that was given, and the form that texts must have; None if texts are free.

        Raises ValueError if two fields are given.
        """
        found: list[tuple[str, StructuredOutputs]] = []
        form = self.response_format
        if form is not None and form.type != "text":
            schema = {"type": "object"} if form.json_schema is None else form.json_schema.definition
            found.append(("response_format", StructuredOutputs(json=schema)))
        if self.structured_outputs is not None:
            found.append(("structured_outputs", self.structured_outputs))
        for name, kind in (("guided_json", "json"), ("guided_regex", "regex"), ("guided_choice", "choice")):
            if (value := getattr(self, name)) is not None:
                found.append((name, StructuredOutputs.model_validate({kind: value})))
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise ValueError(f"a text has one form, and {names} ask for two; leave one of them out")
        return found[0] if found else None
