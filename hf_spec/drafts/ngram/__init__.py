"""Guesses looked up in the text itself."""
