"""The `heavypath` command."""
