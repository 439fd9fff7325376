"""Generation for many prompts: more than fit into one batch, or into memory."""
