"""Draft checkpoints of every project: detect the format, read, write, inspect."""
