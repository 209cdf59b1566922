"""Docstrings for the site: lines such as `name: what it is` become a list, whose continuation lines are indented."""

import re

import griffe

FIELD = re.compile(r"^([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*):\s+(?=\S)")


def with_lists(text: str) -> str:
    """The text with each run of fields as a Markdown list."""
    lines, fields = [], False
    for line in text.splitlines():
        if found := FIELD.match(line):
            if not fields and lines and lines[-1]:
                lines.append("")
            names = ", ".join(f"`{name}`" for name in found[1].split(", "))
            lines.append(f"- {names}: {line[found.end() :]}")
            fields = True
        elif fields and line.startswith(" "):
            lines.append(f"  {line.strip()}")
        else:
            if fields and line:
                lines.append("")
            fields = False
            lines.append(line)
    return "\n".join(lines)


class FieldLists(griffe.Extension):
    """Writes each docstring anew as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Of modules, classes, functions and attributes alike."""
        if obj.docstring:
            obj.docstring.value = with_lists(obj.docstring.value)
