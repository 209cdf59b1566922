"""A disk that is full, as far as this process is concerned."""

import resource
from contextlib import contextmanager


@contextmanager
def file_size(most):
    """Let no file grow beyond so many bytes; Python gets an OSError then, as it does where a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
