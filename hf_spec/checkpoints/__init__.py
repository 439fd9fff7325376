"""Draft checkpoints of every project: find out, read, write, inspect."""
