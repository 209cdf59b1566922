"""Helpers of tests/drafts/test_medusa.py and its neighbours."""

from medusa_checkpoints import published, write

from heavypath.speculative.drafts.medusa.checkpoint import load_medusa


def heads_of(target, tmp_path, **options):
    """Random heads for a tiny target, and their tensors as published."""
    tensors = published(target, **({"heads": 4, "scale": 2.0} | options))
    return load_medusa(write(tmp_path / "heads", tensors), target), tensors
