"""Helpers of tests/options/test_grammar.py and its neighbours."""


def references(length, link=lambda name: {"$ref": name}, last=None):
    definitions = {f"a{index}": link(f"#/$defs/a{index + 1}") for index in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{length}": last or {"type": "null"}}}
