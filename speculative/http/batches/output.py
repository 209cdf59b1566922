"""Files of answers that can be continued after an interruption at any point.

Answers are in the order of the lines. Answers to lines that were refused go to a second file. The first line without an
answer in either file is where to continue. An incomplete last line is dropped, and so are a few answers in one file
after the first line whose answer the other file has lost. Each answer has the digest of its line, so that files with
answers to other lines, or with other options, are not continued.
"""

import fcntl
import json
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, NamedTuple

from heavypath.speculative.http.batches.lines import Line

_BEGINNING = re.compile(rb'\{"id": "line-(\d+)", "custom_id": ("(?:[^"\\]|\\.)*"), "digest": "(\w*)"')
_FIRST = b'{"id": "line-'


class LineAnswer(NamedTuple):
    """The answer to a line of a batch file. status: HTTP status; body: the decoded JSON, None for an invalid line."""

    status: int
    body: Any

    @property
    def is_good(self) -> bool:
        """Whether the line was a valid request and got its texts."""
        return self.status < 400


class _Written(NamedTuple):
    """An answer in a file: the number of its line, and its position in the file in bytes."""

    number: int
    begin: int
    end: int


class Output:
    """The two files of answers: OUT.jsonl, and OUT.errors.jsonl for the answers to lines that were refused.

    Existing files are continued. They are not changed before `check` was called.

    path: OUT.jsonl
    done: how many lines have answers, which is also the number of the next line
    bad:  how many of them were refused

    Raises OSError if the files cannot be written, or another process writes them; ValueError for files of another kind.
    """

    def __init__(self, path: Path):
        self.path = path
        self.errors = errors_beside(path)
        self._files = list[IO[bytes]]()
        try:
            for each in (self.path, self.errors):
                self._files.append(_opened(each))
            self._found = [_answers(file, str(file.name)) for file in self._files]
        except BaseException:
            self._close()
            raise
        numbers = sorted(answer.number for answers in self._found for answer in answers)
        self.done = next((place for place, number in enumerate(numbers) if place != number), len(numbers))
        self.bad = sum(answer.number < self.done for answer in self._found[1])

    def check(self, lines: Iterable[Line], most_dropped: int) -> None:
        """Check that existing answers are to these lines, and cut the files after the last answer before a gap.

        lines: the first lines of the file of requests, at least `done` of them
        most_dropped: how many answers after the first line without one may be dropped

        Raises ValueError if the last answers are to other lines, or too many would be dropped.
        """
        kept = [[answer for answer in answers if answer.number < self.done] for answers in self._found]
        dropped = [len(all_) - len(some) for all_, some in zip(self._found, kept, strict=True)]
        if sum(dropped) > most_dropped:
            lacking = self.path if dropped[1] > dropped[0] else self.errors
            raise ValueError(
                f"line {self.done + 1} has no answer, and {sum(dropped)} lines after it have one. Probably "
                f"{str(lacking)!r} was moved away or cut: put it back, or move {str(self.path)!r} and "
                f"{str(self.errors)!r} both away to start again"
            )
        last = {some[-1].number: (file, some[-1]) for file, some in zip(self._files, kept, strict=True) if some}
        for line in lines:
            if line.number in last and _line_of(*last[line.number]) == (line.custom_id, line.digest):
                del last[line.number]
            if not last:
                break
        if last:
            raise ValueError(
                f"{str(self.path)!r} has answers to other lines, or by other options; give another file, or remove it"
            )
        for file, some in zip(self._files, kept, strict=True):
            file.truncate(some[-1].end if some else 0)
        self._found.clear()

    def write(self, line: Line, outcome: LineAnswer) -> None:
        """Append the answer to the line with number `done`, to the file of answers or of errors."""
        assert line.number == self.done
        answer: dict[str, Any] = {"id": f"line-{line.number}", "custom_id": line.custom_id}
        answer |= {"digest": line.digest, "response": None}
        answer["error"] = {"code": "bad_line", "message": line.error} if line.error else None
        if not line.error:
            answer["response"] = {"status_code": outcome.status, "body": outcome.body}
        file = self._files[not outcome.is_good]
        file.write(json.dumps(answer).encode() + b"\n")
        file.flush()
        self.done += 1
        self.bad += not outcome.is_good

    def close(self) -> None:
        """Flush the files to disk, and close them. An empty file of errors is deleted."""
        try:
            for file in self._files:
                os.fsync(file.fileno())
        finally:
            self._close()

    def _close(self) -> None:
        for file in self._files[1:]:
            if not os.fstat(file.fileno()).st_size:
                self.errors.unlink(missing_ok=True)
        with ExitStack() as closing:  # close both, even if one cannot be flushed because the disk is full
            for file in self._files:
                closing.callback(file.close)


def errors_beside(path: Path) -> Path:
    """The path of the file of errors that belongs to a file of answers: OUT.errors.jsonl for OUT.jsonl."""
    return path.with_name(f"{path.stem}.errors{path.suffix}")


def _opened(path: Path) -> IO[bytes]:
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise OSError(f"another process writes {str(path)!r}: {error.strerror}") from error
    return file


def _answers(file: IO[bytes], name: str) -> list[_Written]:
    """The positions of the complete answers in a file. Raises ValueError, with `name`, if it has anything else."""
    file.seek(0)
    found = list[_Written]()
    end = 0
    for text in file:
        begin = end
        end += len(text)
        answer = _BEGINNING.match(text)
        if answer is not None and text.endswith(b"\n"):
            found.append(_Written(int(answer[1]), begin, end))
        elif text.endswith(b"\n") or text[: len(_FIRST)] != _FIRST[: len(text)]:
            raise ValueError(f"{name!r} has something else than answers of `heavypath batch`: {text[:60]!r}")
    return found


def _line_of(file: IO[bytes], answer: _Written) -> tuple[str, str]:
    """custom_id and digest of an answer's line."""
    file.seek(answer.begin)
    begin = _BEGINNING.match(file.readline())
    assert begin is not None
    return json.loads(begin[2]), begin[3].decode()
