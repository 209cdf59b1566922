"""Files of answers that go on where they ended, wherever that was.

Answers stand in the order of the lines, those of lines that were refused in a file of their own beside the others'. So
the first line that has no answer in either file says where to go on. What was cut off within a line is dropped, and so
is what stands in one of the files behind the answers that the other one has lost.
"""

import fcntl
import json
import os
import re
from pathlib import Path
from typing import IO, Any, NamedTuple

from heavypath.speculative.http.batches.lines import Line

_BEGINNING = re.compile(rb'\{"id": "line-(\d+)", "custom_id": ("(?:[^"\\]|\\.)*")')


class LineAnswer(NamedTuple):
    """The answer to a line: HTTP's status, and the body."""

    status: int
    body: Any

    @property
    def is_good(self) -> bool:
        """True if the line was a request that got its texts."""
        return self.status < 400


class _Written(NamedTuple):
    """An answer in a file: its line's number and name, and where it ends."""

    number: int
    custom_id: str
    end: int


class Output:
    """OUT.jsonl with answers, and OUT.errors.jsonl with those of bad lines.

    done: how many lines have their answers; bad: of these, lines that were refused

    Raises OSError where the files cannot be written, or another process writes them; ValueError for other files.
    """

    def __init__(self, path: Path):
        self.path, self.errors = path, path.with_name(f"{path.stem}.errors{path.suffix}")
        self._files = _opened(self.path), _opened(self.errors)
        found = [_answers(file, file.name) for file in self._files]
        numbers = sorted(answer.number for answers in found for answer in answers)
        self.done = next((place for place, number in enumerate(numbers) if place != number), len(numbers))
        kept = [[answer for answer in answers if answer.number < self.done] for answers in found]
        for file, answers in zip(self._files, kept, strict=True):
            file.truncate(answers[-1].end if answers else 0)
        self.bad = len(kept[1])
        self._last = [answers[-1] for answers in kept if answers]

    def check(self, lines: list[Line]) -> None:
        """Raise ValueError if the last answers are not to the lines of a file.

        lines: the first of them, as many as are done
        """
        for answer in self._last:
            if answer.number >= len(lines) or lines[answer.number].custom_id != answer.custom_id:
                raise ValueError(f"{str(self.path)!r} has answers to other lines; give another file, or remove it")

    def write(self, line: Line, outcome: LineAnswer) -> None:
        """Add the answer to the next line."""
        assert line.number == self.done
        answer: dict[str, Any] = {"id": f"line-{line.number}", "custom_id": line.custom_id, "response": None}
        answer["error"] = {"code": "bad_line", "message": line.error} if line.error else None
        if not line.error:
            answer["response"] = {"status_code": outcome.status, "body": outcome.body}
        file = self._files[not outcome.is_good]
        file.write(json.dumps(answer).encode() + b"\n")
        file.flush()
        self.done += 1
        self.bad += not outcome.is_good

    def close(self) -> None:
        """Have the files on the disk. A file of errors is not left without any."""
        for file in self._files:
            os.fsync(file.fileno())
        if not self.bad:
            self.errors.unlink(missing_ok=True)
        for file in self._files:
            file.close()


def _opened(path: Path) -> IO[bytes]:
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OSError(f"another process writes {str(path)!r}: {error.strerror}") from error
    return file


def _answers(file: IO[bytes], name: str) -> list[_Written]:
    """The answers in a file, but for one that has no end."""
    file.seek(0)
    found, end = list[_Written](), 0
    for text in file:
        end += len(text)
        if text.endswith(b"\n"):
            begin = _BEGINNING.match(text)
            if begin is None:
                raise ValueError(f"{name!r} has something else than answers of `heavypath batch`: {text[:60]!r}")
            found.append(_Written(int(begin[1]), json.loads(begin[2]), end))
    return found
