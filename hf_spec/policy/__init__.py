"""How many tokens each step drafts, and from which source: decided from acceptance rates and step times."""
