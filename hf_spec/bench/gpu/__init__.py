"""``python -m hf_spec.bench.gpu``: all that is to be measured with a GPU, by one command that may be stopped.

The target is the demo family's, inflated to the sizes of bigger models: what it says, and so what is accepted, stays.
"""
