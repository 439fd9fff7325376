"""Guesses of a smaller language model."""
