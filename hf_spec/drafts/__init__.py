"""One file per kind of draft."""
