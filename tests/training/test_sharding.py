"""A draft that FSDP shards over two processes learns, is measured and saved as a whole one.

accelerate shards nothing on a CPU, so its own function for that is called here in place of its launcher.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_trainer
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from groups import leave, run_two
from test_trainer import arguments, eagle3, sharp_target, text
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, AutoModelForCausalLM

from hf_spec.training import DraftTrainer, sharding

KINDS = ("wide_eagle3", "eagle1", "mtp", "medusa", "medusa_sharing", "vanilla", "adapter")


def work(folder: str) -> None:
    """Be one of the processes."""
    dist.init_process_group("gloo")
    for kind in KINDS:
        check(kind, Path(folder) / kind)
    check_that_an_output_layer_by_itself_loses_its_gradient(Path(folder))
    leave()


def check(kind: str, folder: Path) -> None:
    """Compare a trainer with itself before its draft was sharded."""
    target, given = sharp_target(), {}
    if kind == "adapter":
        peft = pytest.importorskip("peft")
        given["peft_config"] = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    draft = getattr(test_trainer, "eagle3" if kind == "adapter" else kind)(target)
    os.environ["ACCELERATE_USE_FSDP"] = "true"  # as its launcher does
    rows = text(4)
    trainer = DraftTrainer(draft, target, arguments(folder), train_dataset=rows, eval_dataset=rows, **given)
    batch = trainer.data_collator(rows)
    trainer.compute_loss(trainer.model, batch).backward()
    whole = {name: one.grad.clone() for name, one in trainer.model.named_parameters() if one.grad is not None}
    saved = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    measured = trainer._measured(rows)
    trainer.model.zero_grad()

    shard(trainer)
    assert any(tensor.to_local().shape != tensor.shape for tensor in trainer.model.parameters())
    trainer.compute_loss(trainer.model, batch).backward()
    found = {name: one.grad.full_tensor() for name, one in trainer.model.named_parameters() if one.grad is not None}
    assert found.keys() == whole.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")
    assert trainer._measured(rows) == measured
    state = get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert kind == "adapter" or all(torch.equal(state[name], saved[name]) for name in saved)
        trainer._save(str(folder), state)
        if kind != "adapter":
            loaded = (AutoModelForCausalLM if kind == "vanilla" else AutoModel).from_pretrained(folder)
            assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.state_dict().items())
    dist.barrier()


def check_that_an_output_layer_by_itself_loses_its_gradient(folder: Path) -> None:
    target, rows = sharp_target(), text(4)
    trainer = DraftTrainer(eagle3(target), target, arguments(folder), train_dataset=rows)
    fully_shard(trainer.model.lm_head)
    fully_shard(trainer.model)
    trainer.compute_loss(trainer.model, trainer.data_collator(rows)).backward()
    assert trainer.model.fc.weight.grad.full_tensor().any()
    assert not trainer.model.lm_head.weight.grad.full_tensor().any()


def shard(trainer: DraftTrainer) -> None:
    """Do what accelerate does with a model on accelerators."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    sharding.set_up(plugin)
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"  # or Trainer writes nothing that can be loaded
    assert plugin.optim_state_dict_config.rank0_only and plugin.state_dict_config.rank0_only
    state = SimpleNamespace(fsdp_plugin=plugin)
    prepared = fsdp2_prepare_model(
        SimpleNamespace(state=state, torch_device_mesh=None, mixed_precision="no", device=torch.device("cpu")),
        trainer.model,
    )
    assert prepared is trainer.model


def test_a_sharded_draft_learns_and_is_measured_and_saved_as_a_whole_one(tmp_path: Path) -> None:
    run_two(tmp_path, f"import test_sharding; test_sharding.work({str(tmp_path)!r})", timeout=200)


def test_fsdp_1_is_refused() -> None:
    with pytest.raises(ValueError, match="not by FSDP 1"):
        sharding.set_up(FullyShardedDataParallelPlugin(fsdp_version=1))


def test_without_fsdp_nothing_is_hidden(tmp_path: Path) -> None:
    target = sharp_target()
    trainer = DraftTrainer(eagle3(target), target, arguments(tmp_path))
    assert trainer.model.get_output_embeddings() is trainer.model.lm_head
    with sharding.gathered(trainer.model):
        assert trainer.model.lm_head.weight.shape == (96, 32)
