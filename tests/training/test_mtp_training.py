"""The MTP layers that targets keep in their own checkpoints are trained and written back there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from golden import CLOSE, GOLDENS
from safetensors.torch import load_file, save_file
from test_mtp_draft import QWEN, mimo
from test_trainer import arguments, losses
from test_unroll import drafted
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_spec import as_speculator, demo
from hf_spec.checkpoints.conversion import export
from hf_spec.drafts.mtp.modeling import MTPDraftModel
from hf_spec.drafts.mtp.target import TargetMtp
from hf_spec.training import DraftTrainer, unroll
from hf_spec.training.recipe import read_recipe, train

STEPS = 3


def load(path: Path) -> tuple[Any, Any]:
    """Load the target at ``path`` and the layer within."""
    target = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    draft = as_speculator("mtp", target)
    assert isinstance(draft, MTPDraftModel)
    return target, draft


@pytest.fixture(params=["qwen3_next", "mimo"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "target"
    if request.param == "mimo":
        mimo(path)
    else:
        shutil.copytree(GOLDENS / QWEN / "checkpoint", path)
    return path


def test_a_targets_own_layer_unrolls_like_its_drafter(checkpoint: Path) -> None:
    target, draft = load(checkpoint)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 50, (1, 9), generator=generator)
    features = torch.randn(1, 9, target.config.hidden_size, generator=generator)
    with torch.no_grad():
        logits = unroll(draft.eval(), ids, features, STEPS)
        for start in range(9):
            for step, expected in enumerate(drafted(draft, ids[0], features[0], start, STEPS)):
                torch.testing.assert_close(logits[step][0, start], expected, **CLOSE)


def test_a_targets_own_layer_is_trained_and_written_back(checkpoint: Path, tmp_path: Path) -> None:
    target, draft = load(checkpoint)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 50, (4, 12), generator=generator).tolist()
    data = [{"input_ids": row, "loss_mask": [0] * 3 + [1] * 9} for row in rows]
    args = arguments(tmp_path, max_steps=30, learning_rate=1e-2, unroll_steps=STEPS)
    trainer = DraftTrainer(draft, target, args, train_dataset=data)
    trainer.train()
    assert losses(trainer)[-1] < 0.7 * losses(trainer)[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())

    export(trainer.draft, tmp_path / "layer", to="native")
    file = checkpoint / "model.safetensors"
    tensors, layer = load_file(file), load_file(tmp_path / "layer" / "mtp.safetensors")
    assert layer.keys() < tensors.keys()
    save_file(tensors | layer, file, metadata={"format": "pt"})
    target, again = load(checkpoint)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in trainer.draft.state_dict().items())
    ids, call = torch.tensor([rows[0][:4]]), {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    out = target.generate(ids, speculator="mtp", **call, pad_token_id=0)
    assert torch.equal(out, target.generate(ids, **call, pad_token_id=0))


def test_a_recipe_starts_from_the_targets_own_layer(checkpoint: Path, tmp_path: Path) -> None:
    _, draft = load(checkpoint)
    AutoTokenizer.from_pretrained(demo.path()).save_pretrained(checkpoint)
    rows = Dataset.from_dict({"input_ids": [[*range(5, 15)]] * 4, "loss_mask": [[1] * 10] * 4})
    DatasetDict(train=rows).save_to_disk(str(tmp_path / "rows"))
    recipe = {"target": str(checkpoint), "draft": "mtp", "data": str(tmp_path / "rows")}
    recipe |= {
        "trainer": {"output_dir": str(tmp_path / "draft"), "max_steps": 1, "use_cpu": True, "learning_rate": 0.1}
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")  # JSON is YAML
    directory, _ = train(read_recipe(tmp_path / "recipe.yaml"), ["--learning_rate", "0.1", "--warmup_steps", "0"])
    trained = AutoModel.from_pretrained(directory).state_dict()
    assert trained.keys() == draft.state_dict().keys()
    moved = [(trained[name] - tensor).abs().max() for name, tensor in draft.state_dict().items()]
    assert 0 < max(moved) < 0.2


def test_layers_that_only_transformers_reads_are_refused(tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(GOLDENS / "mtp_glm4_moe_small" / "checkpoint", dtype=torch.float32)
    with pytest.raises(ValueError, match="can be read, but not written back"):
        DraftTrainer(TargetMtp.of(target), target, arguments(tmp_path))
