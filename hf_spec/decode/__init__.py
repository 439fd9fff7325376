"""The loop of a call: propose, score, verify, commit."""
