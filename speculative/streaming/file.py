"""Read a file at the disk's own speed, into memory that is aligned to blocks.

What the system has in its page cache is copied from there. The rest goes past it, by O_DIRECT: weights that are read
in a circle would push each other, and everything else, out of the cache before they are needed again, and the copy
out of it takes a core half of its time.
"""

import logging
import os
import weakref

logger = logging.getLogger(__name__)

BLOCK = 4096  # addresses, offsets and lengths of direct reads are multiples of it


class WeightFile:
    """An open file that must stay as it is. Any number of threads may read it.

    Raises OSError if it cannot be opened.
    """

    def __init__(self, path: str):
        self.path = path
        self._cached = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self._cached)
        self._stat = self._facts()
        self.size = self._stat[0]
        self._direct = self._cached
        try:
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without direct reads, as tmpfs once was
            logger.debug("%s is read through the page cache: its file system has no direct reads", path)
        else:
            self.close.detach()
            self.close = weakref.finalize(self, _close, self._cached, self._direct)

    def _facts(self) -> tuple[int, int]:
        facts = os.fstat(self._cached)
        return facts.st_size, facts.st_mtime_ns

    def check(self) -> None:
        """Raise OSError if the file has been written to since it was opened."""
        size, _ = facts = self._facts()
        if size < self.size:
            raise OSError(f"{self.path!r} has been truncated, {self.size:,} bytes to {size:,}; load the model anew")
        if facts != self._stat:
            raise OSError(f"{self.path!r} has changed since it was opened; load the model anew")

    def read(self, into: memoryview, begin: int) -> None:
        """Fill memory, whose address and length are multiples of BLOCK as `begin` is; less at the end of the file.

        Raises OSError for a file that ends before.
        """
        wanted, done = min(len(into), self.size - begin), 0
        while done < wanted:
            count = self._read_some(into[done:], begin + done)
            if count <= 0:
                raise OSError(f"{self.path!r} ends at byte {begin + done:,}, expected {self.size:,}: it is truncated")
            done += count

    def _read_some(self, into: memoryview, begin: int) -> int:
        try:
            count = os.preadv(self._cached, [into], begin, os.RWF_NOWAIT)  # what is in the page cache
        except OSError:  # nothing is (EAGAIN), or the file system cannot tell
            count = 0
        count = count if count == len(into) else count // BLOCK * BLOCK  # direct reads go on at a block
        if count > 0:
            return count
        return os.preadv(self._direct if begin % BLOCK == 0 else self._cached, [into], begin)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
