"""A kind of draft is one place: one written here, with one line elsewhere, does all that the others do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import prompts
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel
from twins import target

from hf_spec import AutoDraftModel, Eagle3SpeculatorConfig, SpeculationConfig, SpeculatorConfig, convert, demo, inspect
from hf_spec.checkpoints import kinds
from hf_spec.drafts.base import DraftOutput
from hf_spec.drafts.files import Files, Format, flat_layers
from hf_spec.drafts.layers import classes_of
from hf_spec.drafts.modeling import DraftModel, only_one

datasets = pytest.importorskip("datasets")
from hf_spec.training import DraftTrainer, DraftTrainingArguments  # noqa: E402

# -- the kind: what would be its folder -------------------------------------------------------------------------------


class AdditiveSpeculatorConfig(SpeculatorConfig):
    """Describe a draft that adds a token's embedding to the target's last hidden state."""

    speculators_model_type: str = "additive"


def read_flat(raw: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[AdditiveSpeculatorConfig, dict[str, Tensor]]:
    tensors = {name.replace("sum.", "layers.0."): tensor for name, tensor in tensors.items()}
    return AdditiveSpeculatorConfig(transformer_layer_config=flat_layers(raw, tensors)), tensors


def write_flat(draft: DraftModel) -> Files:
    tensors = {name.replace("layers.0.", "sum."): tensor for name, tensor in draft.state_dict().items()}
    return Files(tensors, config=draft.config.layers.to_diff_dict())


class AdditiveDraftModel(DraftModel):
    """Guess with one decoder layer over the sum of a token's embedding and a hidden state."""

    config_class = AdditiveSpeculatorConfig
    formats = (Format("additive", lambda config, names: "sum.mlp.up_proj.weight" in names, read_flat, owner="Tests"),)
    layouts = {"additive": write_flat}  # noqa: RUF012

    def __init__(self, config: AdditiveSpeculatorConfig) -> None:
        super().__init__(config, config.layers.vocab_size)
        self.layers = nn.ModuleList([classes_of(config.layers.model_type).layer(config.layers, 0)])
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor | None = None,
        hidden_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        logits_to_keep: int = 0,
    ) -> DraftOutput:
        hidden = self.embed(input_ids) + only_one(features, hidden_states)
        hidden = self.decode(hidden, (), position_ids, attention_mask, past_key_values)
        return DraftOutput(self.logits(hidden[:, -logits_to_keep:]), hidden, past_key_values)

    def feature_layers(self, target: Any) -> tuple[int, ...]:
        return (-1,)


# -- what it does -----------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kinds, "DRAFT_MODELS", (*kinds.DRAFT_MODELS, AdditiveDraftModel))  # the line elsewhere
    kinds.register_auto_classes()
    yield
    AutoModel._model_mapping._extra_content.pop(AdditiveSpeculatorConfig)


@pytest.fixture
def draft(listed: None) -> AdditiveDraftModel:
    torch.manual_seed(0)
    return AdditiveDraftModel(AdditiveSpeculatorConfig.for_target(target().config)).eval()


@pytest.mark.parametrize("tree", [None, "dynamic", [(0,), (1,), (0, 0)]])
def test_it_generates_what_plain_generate_does(draft: AdditiveDraftModel, tree: Any) -> None:
    options = prompts(3, (9, 6, 2)) | {"max_new_tokens": 12, "do_sample": False}
    expected = target().generate(**options)
    out = target().generate(**options, speculator=draft, speculation_config=SpeculationConfig(tree=tree))
    assert torch.equal(out, expected)


def test_it_is_saved_loaded_inspected_and_converted(draft: AdditiveDraftModel, tmp_path: Path) -> None:
    draft.save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", to="additive")
    convert(tmp_path / "theirs", tmp_path / "back")
    for name in ("ours", "back"):
        loaded = AutoModel.from_pretrained(tmp_path / name)
        assert type(loaded) is AdditiveDraftModel
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in draft.state_dict().items())
    assert type(AutoDraftModel.from_pretrained(tmp_path / "theirs", target=target())) is AdditiveDraftModel
    report = inspect(tmp_path / "theirs")
    assert (report.layout, report.problem) == ("additive (Tests)", None)
    assert "serve" not in str(report) and "does not know drafts of kind 'additive'" in report.engines["vLLM"][0]
    with pytest.raises(ValueError, match="no eagle3 layout"):
        convert(tmp_path / "ours", tmp_path / "no", to="eagle3")


def test_a_subclass_of_a_config_takes_over_no_files() -> None:
    """Somebody's own fields change nothing for the drafts of others."""

    class ScaledConfig(Eagle3SpeculatorConfig):
        scale: float = 2.0

    assert ScaledConfig().speculators_model_type == "eagle3"
    assert SpeculatorConfig.kinds()["eagle3"] is Eagle3SpeculatorConfig
    draft = AutoModel.from_pretrained(demo.path("draft-eagle3"))
    assert type(draft.config) is Eagle3SpeculatorConfig


def test_weights_that_do_not_fit_are_refused(draft: AdditiveDraftModel, tmp_path: Path) -> None:
    files = write_flat(draft)
    del files.tensors["sum.mlp.down_proj.weight"]
    save_file(files.tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(files.config))
    with pytest.raises(ValueError, match=r"read as additive.*down_proj\.weight is missing"):
        AutoDraftModel.from_pretrained(tmp_path)


def test_it_is_trained_and_saved_by_the_trainer(draft: AdditiveDraftModel, tmp_path: Path) -> None:
    ids = prompts(4, (24,))["input_ids"]
    rows = datasets.Dataset.from_list([{"input_ids": row, "loss_mask": [1] * 24} for row in ids.tolist()])
    args = DraftTrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-3, unroll_steps=3,
        logging_steps=1, report_to=[], use_cpu=True, eval_prompts=0,
    )  # fmt: skip
    trainer = DraftTrainer(draft, target(), args, train_dataset=rows)
    trainer.train()
    losses = [logs["loss"] for logs in trainer.state.log_history if "loss" in logs]
    assert losses[-1] < losses[0]
    trainer.save_model()
    assert type(AutoModel.from_pretrained(tmp_path)) is AdditiveDraftModel
    assert "vLLM does not serve drafts of this kind (additive)" in (tmp_path / "README.md").read_text()


def test_it_can_stand_in_a_recipe(listed: None) -> None:
    assert kinds.config_classes()["additive"] is AdditiveSpeculatorConfig
