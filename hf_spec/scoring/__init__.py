"""Run any model of transformers over a forest of draft tokens: one tree for each sequence of a batch."""
