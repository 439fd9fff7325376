"""A mode in which the bits of a row do not depend on what else is computed with it."""
