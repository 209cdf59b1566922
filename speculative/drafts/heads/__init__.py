"""EAGLE heads: trained drafts of one or a few layers that read the target's hidden states."""
