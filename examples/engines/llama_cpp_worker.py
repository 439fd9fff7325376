"""Decode in llama.cpp, for engine_speed.py: run by the Python of an environment that has llama-cpp-python and gguf.

    python examples/engines/llama_cpp_worker.py '{"model": "DIR", "draft": "lookup", "folder": ".", ...}'

It converts a Llama of transformers to GGUF first, without its tokenizer. It reads and writes what vllm_worker.py does.
``draft`` is "plain", "lookup" for llama-cpp-python's prompt lookup, or the directory of a smaller Llama. Prompts are
answered one after the other.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from worker import Answer, serve

# Tensors of a Llama of transformers, and their names in GGUF.
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
INSIDE = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Bring the rows of q or k into llama.cpp's order: it rotates neighbours, transformers the halves of a head."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a directory in float32; read by hand, because numpy has no bfloat16."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                data = content[start + begin : start + end]
                if entry["dtype"] == "BF16":
                    weight = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
                else:
                    weight = np.frombuffer(data, {"F32": "<f4", "F16": "<f2"}[entry["dtype"]]).astype(np.float32)
                found[name] = weight.reshape(entry["shape"])
    return found


def converted(folder: Path, dtype: str, out: Path) -> Path:
    """Write a Llama as GGUF, without a tokenizer; norms stay float32."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{folder} is a {config['model_type']}: only Llama is converted here")
    place = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]  # a model and its draft may share a name
    path = out / f"{folder.resolve().name}-{place}-{dtype}.gguf"
    half = dtype == "bfloat16"
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_BF16 if half else LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")  # token ids in, token ids out
    for name, weight in read_tensors(folder).items():
        if name in OUTSIDE:
            name = OUTSIDE[name]
        else:
            _, _, layer, rest = name.split(".", 3)
            rest = rest.removesuffix(".weight")
            if rest in ("self_attn.q_proj", "self_attn.k_proj"):
                weight = interleaved(weight, heads if rest == "self_attn.q_proj" else keys)
            name = f"blk.{layer}.{INSIDE[rest]}.weight"
        if half and weight.ndim > 1:
            kind = GGMLQuantizationType.BF16
            writer.add_tensor(name, quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(weight))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


class SmallModel:
    """A draft model: llama-cpp-python calls it with the tokens so far, and it continues them greedily."""

    def __init__(self, model: Any, count: int) -> None:
        self.model, self.count, self.seconds = model, count, 0.0

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        start = time.perf_counter()
        tokens = self.model.generate([int(one) for one in input_ids], temp=0.0, reset=True)
        found = np.array([next(tokens) for _ in range(self.count)], dtype=np.intc)
        self.seconds += time.perf_counter() - start
        return found


def answer(model: Any, draft: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Decode the prompts of a request one after the other."""
    begun = getattr(draft, "seconds", 0.0)
    start = time.perf_counter()
    texts = []
    for ids in request["prompts"]:
        model.reset()
        tokens = model.generate(ids, temp=0.0)
        texts.append([next(tokens) for _ in range(request["max_new_tokens"])])
    seconds = time.perf_counter() - start
    spent = draft.seconds - begun if isinstance(draft, SmallModel) else 0.0 if draft is None else None
    return {"seconds": seconds, "tokens": texts, "accepted_length": None, "draft": spent}


def load(settings: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model and its draft."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    options = {"n_ctx": settings["n_ctx"], "n_threads": settings["threads"], "n_threads_batch": settings["threads"]}
    options |= {"verbose": False, "logits_all": False}
    count, draft = settings["num_speculative_tokens"], None
    if settings["draft"] == "lookup":
        draft = LlamaPromptLookupDecoding(num_pred_tokens=count)
    elif settings["draft"] != "plain":
        small = converted(Path(settings["draft"]), settings["dtype"], folder)
        draft = SmallModel(Llama(str(small), **options), count)
    path = converted(Path(settings["model"]), settings["dtype"], folder)
    return Llama(str(path), **options | {"logits_all": draft is not None}, draft_model=draft), draft


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
    """Return the version, and what answers a request."""
    import llama_cpp

    model, draft = load(settings)
    return {"ready": llama_cpp.__version__}, lambda request: answer(model, draft, request)


if __name__ == "__main__":
    serve(start)
