"""Read a file at the disk's full speed, past the page cache (O_DIRECT), into memory aligned to blocks.

Weights that are read in a circle would evict each other, and everything else, from the page cache before they are
needed again. Copying from the page cache also takes half of a core's time. (Asking what the cache contains, with
RWF_NOWAIT, triggers the system's read-ahead, so the disk would read everything twice.)
"""

import logging
import os
import weakref

logger = logging.getLogger(__name__)

BLOCK = 4096  # addresses, offsets and lengths of direct reads must be multiples of this


class WeightFile:
    """An open file of weights, for direct reads by any number of threads. The file must not change while it is open.

    size: its bytes; close: closes it

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
        """Raise OSError if the file has been changed since it was opened."""
        size, modified, links, _ = facts = self._facts()
        if size < self.size:
            raise OSError(f"{self.path!r} has been truncated, {self.size:,} bytes to {size:,}; load the model anew")
        if (size, modified) == self._stat[:2] and links != self._stat[2]:
            self._stat = facts  # the file was deleted or replaced, which changes its ctime but not its content
        if facts != self._stat:  # mtime can be set back after a change, but ctime cannot
            raise OSError(f"{self.path!r} has changed since it was opened; load the model anew")

    def read(self, into: memoryview, begin: int) -> None:
        """Fill the memory `into` with the bytes of the file from offset `begin` on, or up to the end of the file.

        The address of `into`, its length, and `begin` must be multiples of BLOCK.

        Raises OSError if the file has become shorter.
        """
        wanted = min(len(into), self.size - begin)
        done = 0
        while done < wanted:
            count = os.preadv(self._file, [into[done:]], begin + done)
            if done + count < wanted:
                count = count // BLOCK * BLOCK  # direct reads must continue at a multiple of BLOCK
            if count <= 0:
                raise OSError(f"{self.path!r} ends at byte {begin + done:,}, expected {self.size:,}: it is truncated")
            done += count
