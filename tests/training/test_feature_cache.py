"""Training from cached features against training beside the target; caches that were cut off, mixed up or damaged."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import build
from golden import tiny_target
from groups import in_another_process
from pairs import each_value
from safetensors.torch import load_file
from test_trainer import arguments, eagle1, eagle3, losses, medusa, mtp, sharp_target, text, vanilla
from test_training_data import MARKED, tokenizer

from hf_spec.drafts.modeling import DraftModel
from hf_spec.training import DraftTrainer, FeatureCache, cache_features
from hf_spec.training.embeddings_and_head import load_embeddings_and_head, save_embeddings_and_head
from hf_spec.training.teacher import Reader

LAYERS = (1, 4, 6)
SHARD = 4000  # bytes: about ten rows of three layers and the last one in several shards


def rows() -> list[dict[str, Any]]:
    return [row for length in (6, 9, 4, 12, 7) for row in text(2, length, seed=length, prompt=1)]


def packed() -> list[dict[str, Any]]:
    found = []
    for one, other in zip(rows()[::2], rows()[1::2], strict=True):
        row = {name: [*one[name], *other[name]] for name in one}
        found.append(row | {"document_ids": [0] * len(one["input_ids"]) + [1] * len(other["input_ids"])})
    return found


def cached(folder: Path, **changes: Any) -> FeatureCache:
    given = {"dataset": rows(), "target": sharp_target(), "layers": LAYERS, "directory": folder}
    return cache_features(**(given | {"batch_size": 3, "shard_size": SHARD, "progress": False} | changes))


def files(cache: FeatureCache | Path) -> dict[str, bytes]:
    folder = cache if isinstance(cache, Path) else cache.directory
    return {path.name: path.read_bytes() for path in sorted(folder.glob("features-*"))}


def trained(make: Any, target: Any, data: Any, folder: Path, **changes: Any) -> DraftTrainer:
    args = arguments(folder, **({"per_device_train_batch_size": 1, "max_steps": 6} | changes))
    trainer = DraftTrainer(make(sharp_target()), target, args, train_dataset=data)
    trainer.train()
    return trainer


# -- the same training ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("data", "make"), each_value([packed, rows], [eagle3, eagle1, mtp, medusa, vanilla]))
def test_offline_training_is_online_training(make: Any, data: Any, tmp_path: Path) -> None:
    target = sharp_target()
    draft = make(target)
    layers = draft.feature_layers(target) if isinstance(draft, DraftModel) else ()
    cache = cached(tmp_path / "cache", dataset=data(), layers=layers, batch_size=1)
    online = trained(make, target, data(), tmp_path)
    for one in (target, cache.load_target()):
        offline = trained(make, one, cache, tmp_path)
        assert losses(offline) == losses(online)
        for name, tensor in online.model.state_dict().items():
            assert torch.equal(offline.model.state_dict()[name], tensor), name


def test_batches_of_other_examples_change_rounding_only(tmp_path: Path) -> None:
    options = {"per_device_train_batch_size": 4, "dataloader_num_workers": 1}
    online, offline = (
        losses(trained(eagle3, sharp_target(), data, tmp_path, **options))
        for data in (rows(), cached(tmp_path / "cache", layers=(2, 4, 5)))
    )
    assert offline == pytest.approx(online, rel=1e-4)


@torch.no_grad()
def test_every_example_keeps_its_own_states_and_columns(tmp_path: Path) -> None:
    for data in (rows(), packed()):
        target, cache = sharp_target(), cached(tmp_path / str(len(data)), dataset=data)
        assert len(files(cache)) > 2 and len(cache) == len(data)
        for given, row in zip(data, pickle.loads(pickle.dumps(cache)), strict=True):
            states = row.pop("states")
            assert row == given
            documents = torch.tensor([given["document_ids"]]) if "document_ids" in given else None
            layers, last = Reader(target, LAYERS).read(torch.tensor([given["input_ids"]]), documents)
            for layer, expected in zip((*LAYERS, -1), (*layers, last), strict=True):
                torch.testing.assert_close(states[layer], expected[0], atol=1e-5, rtol=1e-5)


def test_one_cache_serves_drafts_that_read_less(tmp_path: Path) -> None:
    cache = cached(tmp_path / "cache", layers=(2, 4, 5, 8), batch_size=1)
    for make in (eagle3, medusa):
        expected = losses(trained(make, sharp_target(), rows(), tmp_path))
        assert losses(trained(make, sharp_target(), cache, tmp_path)) == expected


def test_states_may_be_kept_in_half_the_precision(tmp_path: Path) -> None:
    exact, half = (cached(tmp_path / str(dtype), dtype=dtype) for dtype in (None, torch.bfloat16))
    assert exact.made_from["dtype"] == "float32" and half[0]["states"][4].dtype == torch.bfloat16
    torch.testing.assert_close(half[3]["states"][4], exact[3]["states"][4].bfloat16())
    found = [losses(trained(medusa, sharp_target(), cache, tmp_path)) for cache in (exact, half)]
    assert found[0] != found[1] == pytest.approx(found[0], rel=0.05)


def test_evaluation_without_the_targets_layers_tells_what_a_text_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("transformers").propagate = True
    logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]  # another test may have been warned before
    cache, found = cached(tmp_path / "cache", layers=(2, 4, 5), batch_size=1), []
    for target in (sharp_target(), cache.load_target()):
        trainer = DraftTrainer(eagle3(sharp_target()), target, arguments(tmp_path), eval_dataset=cache)
        found.append({name: value for name, value in trainer.evaluate().items() if "per_second" not in name})
    trainer.save_model(str(tmp_path / "saved"))
    assert "eval_acceptance_length" in found[0] and not any("acceptance" in name for name in found[1])
    same = [name for name in found[1] if name not in ("eval_runtime", "eval_model_preparation_time")]
    assert {name: found[1][name] for name in same} == {name: found[0][name] for name in same}
    assert "nothing is measured by generation" in caplog.text


# -- the target without its layers ------------------------------------------------------------------------------------


KINDS = "llama gemma2 gemma3_text cohere granite gpt2 phi mixtral opt bert vl:qwen2_vl".split()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_embeddings_and_output_layer_give_the_targets_distributions(kind: str, tmp_path: Path) -> None:
    model = build(kind, seed=0)
    model.config.name_or_path = "ORG/MODEL"
    save_embeddings_and_head(model, tmp_path)
    kept, ids = load_embeddings_and_head(tmp_path), torch.arange(5, 12)[None]
    _, hidden = Reader(model).read(ids)
    assert torch.equal(Reader(kept).logits(hidden[0]), Reader(model).logits(hidden[0]))
    assert torch.equal(kept.get_input_embeddings()(ids), model.get_input_embeddings()(ids))
    assert sum(parameter.numel() for parameter in kept.parameters()) < model.num_parameters() / 2
    assert kept.config.name_or_path == "ORG/MODEL"
    with pytest.raises(ValueError, match="has no layers"):
        kept.generate(ids, max_new_tokens=1)


def test_a_target_whose_logits_take_more_must_be_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("transformers").propagate = True
    target = sharp_target()
    target.lm_head.register_forward_hook(lambda module, args, output: 2 * output)
    cache = cached(tmp_path / "cache", target=target)
    assert "needs the complete target" in caplog.text
    with pytest.raises(ValueError, match="load the complete target"):
        cache.load_target()


def adapted(*modules: str) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=[*modules], init_lora_weights=False)
    return peft.get_peft_model(sharp_target(), config)


def test_states_are_those_of_a_target_with_its_adapter(tmp_path: Path) -> None:
    plain, cache = cached(tmp_path / "plain"), cached(tmp_path / "adapted", target=adapted("q_proj", "down_proj"))
    assert not torch.equal(plain[0]["states"][4], cache[0]["states"][4])
    expected = losses(trained(medusa, adapted("q_proj", "down_proj"), rows(), tmp_path))
    for target in (adapted("q_proj", "down_proj"), cache.load_target()):
        assert losses(trained(medusa, target, cache, tmp_path)) == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ValueError, match="the target's layers differ"):
        trained(medusa, sharp_target(), cache, tmp_path)
    with pytest.raises(ValueError, match="load the complete target"):
        cached(tmp_path / "head", target=adapted("lm_head")).load_target()


def test_states_of_another_adapter_are_not_taken(tmp_path: Path) -> None:
    target = adapted("q_proj")
    target.add_adapter("other", target.peft_config["default"])
    cached(tmp_path, target=target)
    cached(tmp_path, target=target)
    layer = next(one for one in target.modules() if hasattr(one, "scale_layer"))

    def refused() -> None:
        with pytest.raises(ValueError, match="the target's active adapters or their scaling differ"):
            cached(tmp_path, target=target)

    with target.disable_adapter():
        refused()
    layer.scale_layer(2)  # of one layer
    refused()
    layer.unscale_layer()
    target.set_adapter("other")
    refused()
    target.set_adapter("default")
    cached(tmp_path, target=target)


def test_names_on_disk_stay_as_they_were_first_written(tmp_path: Path) -> None:
    made = cached(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index.keys() == {"format", "made_from", "count", "shards"} and index["format"] == 1
    assert index["made_from"].keys() == {
        *("shard_size", "ends", "config", "body", "tokenizer", "dataset", "layers", "dtype", "name")
    }
    assert {path.name for path in (tmp_path / "target").iterdir()} >= {"config.json", "ends.safetensors"}
    states = {f"states.{layer}" for layer in (-1, *LAYERS)}
    assert load_file(tmp_path / "features-00000.safetensors").keys() == {
        *("input_ids", "loss_mask", "rows", "lengths", "checksums"),
        *states,
    }
    assert len(made) == len(rows())


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1, "made_fr', '{"format": 1}', '{"format": 2}'])
def test_an_index_that_is_none_is_named(content: str, tmp_path: Path) -> None:
    cached(tmp_path)
    (tmp_path / "index.json").write_text(content)
    for call in (lambda: FeatureCache(tmp_path), lambda: cached(tmp_path)):
        with pytest.raises(ValueError, match=r"index\.json is no index of a feature cache, .* or cut off: remove"):
            call()


@pytest.mark.parametrize("file", ["config.json", "ends.safetensors"])
def test_what_is_kept_of_the_target_is_named_where_it_is_cut_off(file: str, tmp_path: Path) -> None:
    path = cached(tmp_path).directory / "target" / file
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"target is damaged .*: remove it, and load the complete target instead"):
        FeatureCache(tmp_path).load_target()


def other_weights() -> Any:
    target = sharp_target()
    target.model.layers[3].mlp.up_proj.weight.data.add_(0.01)
    return target


def other_head() -> Any:
    target = sharp_target()
    target.lm_head.weight.data.mul_(1.1)
    return target


def other_config() -> Any:
    target = sharp_target()
    target.config.rms_norm_eps = 1e-3
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": other_weights}, "the target's layers differ"),
        ({"target": other_head}, "the target's embeddings or output layer differ"),
        ({"target": other_config}, "the target's config differs"),
        ({"tokenizer": lambda: tokenizer(MARKED)}, "the tokenizer differs"),
        ({"dataset": lambda: rows()[:-1]}, "the dataset differs"),
        ({"dataset": lambda: [*rows()[:-1], rows()[-1] | {"loss_mask": [1] * 7}]}, "the dataset differs"),
        ({"layers": lambda: (1, 4, 7)}, r"layers was \[-1, 1, 4, 6\], not \[-1, 1, 4, 7\]"),
        ({"dtype": lambda: torch.bfloat16}, "dtype was float32, not bfloat16"),
    ],
)
def test_a_cache_of_something_else_is_refused(
    changes: dict[str, Callable[[], Any]], message: str, tmp_path: Path
) -> None:
    made = cached(tmp_path, tokenizer=tokenizer())
    before = files(made)
    with pytest.raises(ValueError, match=message) as found:
        cached(tmp_path, **({"tokenizer": tokenizer()} | {name: change() for name, change in changes.items()}))
    assert ";" not in str(found.value)  # and nothing else
    assert files(made) == before


def test_the_same_cache_is_opened_as_it_is(tmp_path: Path) -> None:
    target = tiny_target()
    made = cached(tmp_path / "cache", target=target, tokenizer=tokenizer())
    target.save_pretrained(tmp_path / "target")
    loaded = type(target).from_pretrained(tmp_path / "target")
    times = [path.stat().st_mtime_ns for path in sorted(made.directory.iterdir())]
    same: list[dict[str, Any]] = [{"tokenizer": tokenizer()}, {"batch_size": 1}, {"shard_size": 2 * SHARD}]
    for changes in (*same, {"layers": (6, 1)}, {"target": made.load_target()}, {}):
        again = cached(made.directory, **({"target": loaded} | changes))
        assert again.made_from == made.made_from
    assert [path.stat().st_mtime_ns for path in sorted(made.directory.iterdir())] == times
    half = cached(tmp_path / "half", dtype=torch.bfloat16)
    assert cached(half.directory).made_from == half.made_from


def test_the_trainer_refuses_features_that_its_draft_does_not_read(tmp_path: Path) -> None:
    target, args = sharp_target(), arguments(tmp_path)
    cache = cached(tmp_path / "cache", layers=(2, 4, 5))
    wrong = cached(tmp_path / "wrong", layers=(2, 4))
    other = cached(tmp_path / "other", layers=(2, 4, 5), target=other_head())
    for data in ({"train_dataset": wrong}, {"train_dataset": rows(), "eval_dataset": {"held out": wrong}}):
        with pytest.raises(ValueError, match=r"layers: it has \[-1, 2, 4\], and \[5\] are missing"):
            DraftTrainer(eagle3(target), target, args, **data)
    for one in (target, cache.load_target()):
        with pytest.raises(ValueError, match="embeddings or output layer differ"):
            DraftTrainer(eagle3(target), one, args, train_dataset=other)
    with pytest.raises(ValueError, match="the target's layers differ"):
        DraftTrainer(eagle3(target), other_weights(), args, train_dataset=cache)
    with pytest.raises(ValueError, match="cache the features of every dataset"):
        DraftTrainer(eagle3(target), cache.load_target(), args, train_dataset=cache, eval_dataset=rows())
    measured = arguments(tmp_path, metric_for_best_model="eval_acceptance_length")
    with pytest.raises(ValueError, match="eval_acceptance_length is measured by generation"):
        DraftTrainer(eagle3(target), cache.load_target(), measured, train_dataset=cache)
    DraftTrainer(eagle3(target), target, measured, train_dataset=cache, eval_dataset=rows())
    DraftTrainer(eagle3(target), cache.load_target(), args, train_dataset=cache, eval_dataset=cache)


def test_unusable_data_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is empty"):
        cached(tmp_path, dataset=[])
    with pytest.raises(ValueError, match="to 96, but the target has 96 tokens"):
        cached(tmp_path, dataset=[*rows(), {"input_ids": [3, 96], "loss_mask": [1, 1]}])
    with pytest.raises(ValueError, match="batch_size is 0 and shard_size 4000; set at least 1"):
        cached(tmp_path, batch_size=0)
    for layers in ((-2, 4), (4, 9)):
        with pytest.raises(ValueError, match="below -1 or above 8"):
            cached(tmp_path, layers=layers)
    with pytest.raises(ValueError, match="holds no feature cache"):
        FeatureCache(tmp_path)
    assert not list(tmp_path.iterdir())


# -- what is cut off or damaged ---------------------------------------------------------------------------------------


def kill_at(call: int, folder: Path) -> None:
    """Make a cache, but die at a call of ``os.fsync``: each shard has one, and the index behind it."""
    flush, calls = os.fsync, iter(range(1, 100))

    def flush_or_die(file: int) -> None:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(file)

    os.fsync = flush_or_die
    cached(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("call", "whole", "left"), [(1, 0, 0), (5, 2, 2), (6, 2, 3)])
def test_a_killed_call_goes_on_behind_its_finished_shards(call: int, whole: int, left: int, tmp_path: Path) -> None:
    folder, expected = tmp_path / "cache", files(cached(tmp_path / "uninterrupted"))
    assert in_another_process(kill_at, call, folder) == -signal.SIGKILL
    found = files(folder)
    assert sum(name.endswith(".safetensors") for name in found) == left
    assert any(path.name.endswith(".tmp") for path in folder.iterdir())
    with pytest.raises(ValueError, match=f"only {whole} of {len(expected)}" if whole else "no feature cache"):
        FeatureCache(folder)
    times = {name: (folder / name).stat().st_mtime_ns for name in list(expected)[:whole]}
    with pytest.raises(ValueError, match=r"has no layers to finish the cache .* load the complete one"):
        cached(folder, target=load_embeddings_and_head(tmp_path / "uninterrupted" / "target"))
    assert files(cached(folder)) == expected
    assert {name: (folder / name).stat().st_mtime_ns for name in times} == times


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_and_finished_shards_are_kept(tmp_path: Path) -> None:
    folder, expected = tmp_path / "cache", files(cached(tmp_path / "uninterrupted"))
    folder.mkdir()
    (folder / "features-00001.safetensors.tmp").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: features-00001\.safetensors .* repeat the call"):
        cached(folder)
    found = files(folder)
    assert found and found.items() < expected.items()
    assert files(cached(folder)) == expected


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 64
    path.write_bytes(content)


def scribble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "bytes instead of"),
        (flip, "does not hold what was written"),
        (scribble, "cannot be read"),
        (Path.unlink, "is missing: "),
    ],
)
def test_a_damaged_shard_is_named_and_made_again_alone(damage: Any, message: str, tmp_path: Path) -> None:
    whole = files(cached(tmp_path))
    shard = tmp_path / "features-00002.safetensors"
    others = [path for path in sorted(tmp_path.glob("features-*")) if path != shard]
    damage(shard)
    with pytest.raises(OSError, match=rf"features-00002\.safetensors .* {message}.*repeat cache_features") as told:
        list(FeatureCache(tmp_path))
    assert ("remove it" in str(told.value)) == shard.exists()
    shard.unlink(missing_ok=True)
    times = [path.stat().st_mtime_ns for path in others]
    assert files(cached(tmp_path)) == whole
    assert [path.stat().st_mtime_ns for path in others] == times
