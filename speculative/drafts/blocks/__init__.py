"""Block drafts: trained heads that compute the logits of all depths of a tree in one pass (DFlash and similar ones)."""
