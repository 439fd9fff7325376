"""transformers' server, ``transformers serve``, with speculative decoding; needs the extra ``hf-spec[serve]``."""
