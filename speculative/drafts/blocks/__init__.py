"""Block drafts: trained heads that give the logits of all depths of a tree in one pass (DFlash and its relatives)."""
