"""Early exit: the target's own first layers as its draft."""
