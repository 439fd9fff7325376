"""What a user could name in version 0.1.0 is still there, with the same defaults; more may be there.

``fixtures/public_api.json`` was written by ``python tests/test_public_api.py FILE`` at commit bde165d.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig, TrainingArguments
from transformers.utils.generic import ModelOutput

import hf_spec
from hf_spec import cli, training
from hf_spec.checkpoints.kinds import config_classes, layouts
from hf_spec.scoring.names import CACHE
from hf_spec.training.recipe import read_recipe

NO_LONGER_REQUIRED = {(command, "--speculator") for command in ("generate", "chat", "serve")}
THEN = Path(__file__).parent / "fixtures" / "public_api.json"


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command of ``hf-spec``, by name."""

    class Caught(Exception):
        pass

    def catch(self: argparse.ArgumentParser, *args: Any) -> None:
        raise Caught(self)

    original = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = catch  # type: ignore[method-assign,assignment]
    try:
        cli.main([])
    except Caught as caught:
        (commands,) = (one for one in caught.args[0]._actions if isinstance(one, argparse._SubParsersAction))
        return dict(commands.choices)
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
    raise AssertionError("hf-spec did not parse its arguments")


def command_line() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, parser in parsers().items():
        found[name] = {
            option: {"default": action.default, "nargs": action.nargs, "choices": sorted(action.choices or ())}
            for action in parser._actions
            for option in action.option_strings or [action.dest]
            if action.dest != "help"
        }
    return found


def configurations() -> dict[str, dict[str, str]]:
    """List the fields of every class of settings with their defaults; what transformers' own classes add is theirs."""
    kinds = [getattr(hf_spec, name) for name in hf_spec.__all__ if name.endswith("Config")]
    theirs = {field.name for base in (PreTrainedConfig, TrainingArguments) for field in dataclasses.fields(base)}
    return {
        kind.__name__: {one.name: default(one) for one in dataclasses.fields(kind) if one.name not in theirs}
        for kind in (*kinds, training.DraftTrainingArguments)
    }


def default(field: dataclasses.Field[Any]) -> str:
    made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    return "required" if made is dataclasses.MISSING else repr(made)


def signatures() -> dict[str, dict[str, str]]:
    """List the parameters of public functions, classes and the methods that a user's own drafts implement."""
    names = {
        f"{module.__name__}.{name}": getattr(module, name) for module in (hf_spec, training) for name in module.__all__
    }
    names |= {
        f"hf_spec.Speculator.{name}": getattr(hf_spec.Speculator, name)
        for name in ("feature_layers", "check", "defaults", "drafter", "learn")
    }
    configs = (PreTrainedConfig, TrainingArguments)
    found = {}
    for name, one in names.items():
        if not (inspect.isclass(one) and issubclass(one, configs)):
            parameters = inspect.signature(one).parameters.values()
            found[name] = {
                old_name(one, each.name): "required" if each.default is each.empty else repr(each.default)
                for each in parameters
                if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            }
    return found


def old_name(one: Any, parameter: str) -> str:
    """Return the name that a ``parameter`` had before transformers renamed the cache in its outputs."""
    is_output = inspect.isclass(one) and issubclass(one, ModelOutput)
    return "past_key_values" if is_output and parameter == CACHE else parameter


def recipe_keys() -> dict[str, list[str]]:
    recipe = importlib.import_module("hf_spec.training.recipe")
    kinds = {
        kind: sorted(
            {one.name for one in dataclasses.fields(config)} - recipe._fields(PreTrainedConfig) - recipe.SET_BY_US
        )
        for kind, config in config_classes().items()
    }
    return {
        "": sorted(recipe.SECTIONS),
        "target": sorted(recipe.TARGET),
        "prepare": sorted(recipe.PREPARE),
        "features": sorted(recipe.FEATURES),
        "trainer": sorted(recipe._fields(training.DraftTrainingArguments) - recipe._fields(TrainingArguments)),
    } | {f"draft {kind}": ["kind", "layers", *keys] for kind, keys in kinds.items()}


def public_api() -> dict[str, Any]:
    return {
        "names": {"hf_spec": sorted(hf_spec.__all__), "hf_spec.training": sorted(training.__all__)},
        "commands": command_line(),
        "configurations": configurations(),
        "signatures": signatures(),
        "recipe": recipe_keys(),
    }


# --- Then and now ----------------------------------------------------------------------------------------------------


def then(part: str) -> Any:
    return json.loads(THEN.read_text(encoding="utf-8"))[part]


def missing(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Name what ``new`` lacks of ``old`` or holds with another value."""
    return [
        f"{group}: {name} was {value!r}, is {new.get(group, {}).get(name, 'gone')!r}"
        for group, values in old.items()
        for name, value in values.items()
        if new.get(group, {}).get(name, "gone") != value
    ]


@pytest.mark.parametrize("module", ["hf_spec", "hf_spec.training"])
def test_public_names(module: str) -> None:
    assert set(then("names")[module]) <= set(importlib.import_module(module).__all__)


def test_fields_of_configurations() -> None:
    assert missing(then("configurations"), configurations()) == []


def test_parameters_of_functions() -> None:
    assert missing(then("signatures"), signatures()) == []


def test_commands_and_their_options() -> None:
    now = command_line()
    for command, options in then("commands").items():
        assert options.keys() <= now[command].keys()
        for option, old in options.items():
            new = now[command][option]
            if (command, option) in NO_LONGER_REQUIRED and new["default"] == "auto":
                old["default"] = "auto"
            assert (new["default"], new["nargs"]) == (old["default"], old["nargs"]), f"{command} {option}"
            choices = layouts() if option == "--to" else new["choices"]  # checked without being named in the help
            assert set(old["choices"]) <= set(choices), f"{command} {option}"


def test_keys_of_a_recipe(tmp_path: Path) -> None:
    """Every key is known still: what is said of it is about its value, or about another key."""
    for section, keys in then("recipe").items():
        for key in keys:
            recipe: dict[str, Any] = {
                "target": {"name": "a"},
                "draft": "mtp",
                "data": "b",
                "features": {},
                "trainer": {},
            }
            name, _, kind = section.partition(" ")
            place: dict[str, Any] = recipe if not name else recipe.setdefault(name, {})
            if kind:
                place = recipe["draft"] = {"kind": kind}
            place.setdefault(key, None)
            file = tmp_path / "recipe.yaml"
            file.write_text(json.dumps(recipe), encoding="utf-8")
            assert "has no" not in problem(file), f"{section} {key}"


def problem(file: Path) -> str:
    try:
        read_recipe(file)
    except ValueError as error:
        return str(error)
    return ""


def test_the_keys_of_today_hold_those_of_then() -> None:
    now = recipe_keys()
    for section, keys in then("recipe").items():
        assert set(keys) <= set(now[section]), section


def test_what_is_missing_is_found() -> None:
    old = {"a": {"x": 1, "y": 2}, "b": {"z": 3}}
    assert missing(old, {"a": {"x": 1, "y": 2, "more": 0}, "b": {"z": 3}, "c": {}}) == []
    assert missing(old, {"a": {"x": 1, "y": 5}}) == ["a: y was 2, is 5", "b: z was 3, is 'gone'"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(public_api(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
