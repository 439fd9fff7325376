"""Draft tokens of a smaller language model."""
