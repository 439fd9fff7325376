"""Draft tokens copied from the text itself."""
