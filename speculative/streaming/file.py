"""Read a file at the disk's own speed, into memory that is aligned to blocks.

Reads go past the system's page cache, by O_DIRECT. Weights that are read in a circle would push each other, and
everything else, out of it before they are needed again. The copy out of it also takes a core half of its time. A
question about the cache's contents (RWF_NOWAIT) has the system read ahead, so that the disk would read everything
twice.
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
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:  # a file system without direct reads, as tmpfs once was; or no such file
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            logger.debug("%s is read through the page cache: its file system has no direct reads", path)
        self.close = weakref.finalize(self, os.close, self._file)
        self._stat = self._facts()
        self.size = self._stat[0]

    def _facts(self) -> tuple[int, int, int, int]:
        facts = os.fstat(self._file)
        return facts.st_size, facts.st_mtime_ns, facts.st_nlink, facts.st_ctime_ns

    def check(self) -> None:
        """Raise OSError if the file has been written to since it was opened."""
        size, modified, links, _ = facts = self._facts()
        if size < self.size:
            raise OSError(f"{self.path!r} has been truncated, {self.size:,} bytes to {size:,}; load the model anew")
        if (size, modified) == self._stat[:2] and links != self._stat[2]:
            self._stat = facts  # it was deleted, or replaced by another: that sets its ctime, too, and writes nothing
        if facts != self._stat:  # whoever puts mtime back cannot put back ctime
            raise OSError(f"{self.path!r} has changed since it was opened; load the model anew")

    def read(self, into: memoryview, begin: int) -> None:
        """Fill memory, whose address and length are multiples of BLOCK as `begin` is; less at the end of the file.

        Raises OSError for a file that ends before.
        """
        wanted, done = min(len(into), self.size - begin), 0
        while done < wanted:
            count = os.preadv(self._file, [into[done:]], begin + done)
            if done + count < wanted:
                count = count // BLOCK * BLOCK  # where the next direct read can go on
            if count <= 0:
                raise OSError(f"{self.path!r} ends at byte {begin + done:,}, expected {self.size:,}: it is truncated")
            done += count
