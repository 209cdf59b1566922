"""Prompts to train a draft with: eight kinds of work, made from templates and lists of words.

    python bench/real/prompts.py --count 1200 > prompts.jsonl      # a conversation on each line, for `heavypath distil`
    python bench/real/prompts.py --after 1680 --count 16 --suite > held-out.json       # for `heavypath compare --suite`

The second are the 16 after those of which `smollm2-texts` has answers: alike, and not trained with. The kinds are those
of the suite (`heavypath compare --suite`), the texts are not: a draft is measured on other prompts than those it was
trained with. The same seed gives the same prompts.
"""

import argparse
import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]

# Templates by kind, and lists of words. A {name} in a template stands for an entry of the list of that name.
WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))


def names_in(template: str) -> list[str]:
    return sorted({*re.findall(r"{(\w+)}", template)})


def pick(random_: random.Random, template: str) -> str:
    """A template with its {names} replaced by entries of the lists of these names."""
    fields = {name: random_.choice(WORDS[name]) for name in names_in(template)}
    return template.format(**fields)


def passage(random_: random.Random, least: int = 3, most: int = 7) -> str:
    """Some sentences about one subject."""
    kind = random_.choice([*WORDS["sentences"]])
    templates = random_.sample(
        WORDS["sentences"][kind], random_.randint(least, min(most, len(WORDS["sentences"][kind])))
    )
    who, where = random_.choice(WORDS["person"]), random_.choice(WORDS["place"])
    return " ".join(pick(random_, each.replace("{who}", who).replace("{where}", where)) for each in templates)


def of_template(templates: Sequence[str]) -> Callable[[random.Random], list[str]]:
    return lambda random_: [pick(random_, random_.choice(templates))]


def about_text(tasks: Sequence[str]) -> Callable[[random.Random], list[str]]:
    return lambda random_: [f"{pick(random_, random_.choice(tasks))}\n\n{passage(random_)}"]


def code(random_: random.Random) -> list[str]:
    if random_.random() < 0.3:
        return [f"{random_.choice(WORDS['about_code'])}\n\n```python\n{random_.choice(WORDS['snippet'])}\n```"]
    return [pick(random_, random_.choice(WORDS["code"]))]


def maths(random_: random.Random) -> list[str]:
    template = random_.choice(WORDS["maths"])
    numbers = {name: str(random_.randint(2, 60)) for name in "abcd"}
    fields = {name: random_.choice(WORDS[name]) for name in names_in(template) if len(name) > 1}
    return [template.format(**numbers, **fields)]


def dialogue(random_: random.Random) -> list[str]:
    first, answer, *next_ = random_.choice(WORDS["dialogue"])
    thing = random_.choice(WORDS["hobby"])
    return [each.format(hobby=thing) for each in (first, answer, random_.choice(next_))]


KINDS: dict[str, Callable[[random.Random], list[str]]] = {
    "writing": of_template(WORDS["writing"]),
    "code": code,
    "summary": about_text(WORDS["summary"]),
    "extraction": about_text(WORDS["extraction"]),
    "translation": about_text(WORDS["translation"]),
    "maths": maths,
    "dialogue": dialogue,
    "rewriting": about_text(WORDS["rewriting"]),
}


def prompts(count: int, seed: int = 0) -> list[Messages]:
    """`count` different conversations that end with a message of the user, each kind in turn."""
    return [messages for _, messages in with_kinds(count, seed)]


def with_kinds(count: int, seed: int = 0) -> list[tuple[str, Messages]]:
    """The conversations of `prompts`, each after the name of its kind."""
    random_ = random.Random(seed)
    found: dict[str, tuple[str, Messages]] = {}
    kinds = [*KINDS]
    for number in range(20 * count):
        kind = kinds[number % len(kinds)]
        texts = KINDS[kind](random_)
        roles = ["user", "assistant"] * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        found["\n".join(texts)] = kind, messages
        if len(found) == count:
            return [*found.values()]
    raise ValueError(f"the templates give fewer than {count} different prompts, {len(found)} were found")


def suite_of(conversations: Sequence[tuple[str, Messages]]) -> dict[str, list[list[str]]]:
    """The conversations by their kinds, as `heavypath compare --suite` reads them."""
    return {
        kind: [[message["content"] for message in messages] for name, messages in conversations if name == kind]
        for kind in dict.fromkeys(name for name, _ in conversations)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1200)
    parser.add_argument("--after", type=int, default=0, help="leave out so many before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suite", action="store_true", help="print a suite instead of lines")
    given = parser.parse_args()
    conversations = with_kinds(given.after + given.count, given.seed)[given.after :]
    if given.suite:
        print(json.dumps(suite_of(conversations), ensure_ascii=False, indent=1))
        return
    for _, messages in conversations:
        print(json.dumps({"messages": messages}, ensure_ascii=False))


if __name__ == "__main__":
    main()
