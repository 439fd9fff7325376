"""transformers' own server, ``transformers serve``, with a target that guesses; needs the extra ``hf-spec[serve]``."""
