"""Run any model of transformers over trees of draft tokens: one tree for each sequence of a batch."""
