"""Training forwards: what a draft would propose from every position of a text, all at once."""
