"""What the configs of all drafts on disk share."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import fields
from typing import Any, ClassVar, cast

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from .config_keys import PASSING, Known, keys_of_layers, known, unknown_keys, warn_of_unknown
from .settings import DEFAULT_NUM_SPECULATIVE_TOKENS, SpeculationConfig, is_int
from .untrusted import printable
from .versions import CompositeConfig, SubConfigSpec

logger = logging.get_logger(__name__)

GEMMA = "gemma4_text"  # whose layers DeepSpec makes drafts of
GEMMA_ONLY = ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers", "use_double_wide_mlp")
LAYER_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)

TARGET_SIZES = ("num_hidden_layers", "hidden_size")  # which drafts keep of their target

# More than any draft has; what says more is damaged, or made to fill the memory.
MOST_WIDE, MOST_LAYERS = 1 << 27, 1000
SPECULATORS_KEYS = known("algorithm", "default_proposal_method") | {
    "proposal_methods": [known("proposal_type", "speculative_tokens", "verifier_accept_k", "accept_tolerance")],
    "verifier": known("name_or_path", "architectures", *TARGET_SIZES),
}
IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")


class SpeculatorConfig(CompositeConfig):
    """Describe a draft on disk: ``model_type: "speculators"``, so that AutoModel, speculators and vLLM read it.

    ``from_dict`` (and so ``AutoConfig.from_pretrained``) gives the sub-config that ``speculators_model_type`` names.

    Args:
        transformer_layer_config: a config of transformers for the draft's decoder layers. Its ``vocab_size`` is the
            target's, its ``num_hidden_layers`` counts the draft's layers.
        speculators_config: ``{"algorithm", "proposal_methods", "default_proposal_method", "verifier"}`` as the
            speculators library writes it. Acceptance stays lossless whatever ``verifier_accept_k`` and
            ``accept_tolerance`` of a proposal method say, unless a call asks for ``acceptance="near_best"``.
        shared_with_target: which of ``"embed_tokens"`` and ``"lm_head"`` are the target's and not in the file.

    Errors: TypeError and ValueError that name the field, its value and what to do.
    """

    model_type = "speculators"
    sub_configs_defaults: ClassVar[dict[str, SubConfigSpec]] = {
        "transformer_layer_config": SubConfigSpec(AutoConfig, "llama", {"num_hidden_layers": 1})
    }
    layer_model_types: ClassVar[tuple[str, ...]] = ("llama", "qwen3")
    code: ClassVar[dict[str, str] | None] = None  # the ``auto_map`` of files that hold this code themselves

    speculators_model_type: str = ""
    transformer_layer_config: dict[str, Any] | PreTrainedConfig | None = None
    speculators_config: dict[str, Any] | None = None
    shared_with_target: list[str] | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_layer_type()
        kwargs.pop("auto_map", None)  # names classes of whoever wrote the file
        if self.code is not None:
            kwargs["auto_map"] = dict(self.code)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self._fill_in()
        if hasattr(self.layers, "quantization_config"):  # of the target whose layers these are, not of this file
            layers: Any = copy.copy(self.layers)
            del layers.quantization_config
            self.transformer_layer_config = layers
        self.validate()

    def _fill_in(self) -> None:
        """Replace every None that has a meaning by it, so that it is saved."""
        if self.shared_with_target is None:
            self.shared_with_target = []
        if self.speculators_config is None:
            self.speculators_config = default_speculators_config(self.speculators_model_type)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the sub-config that ``speculators_model_type`` names; a ValueError lists the known ones."""
        if cls is not SpeculatorConfig:
            # A file may not choose the attention: some names fetch kernels of the Hub and run them.
            config_dict = {name: value for name, value in config_dict.items() if name not in IMPLEMENTATIONS}
            if path := kwargs.get("name_or_path"):
                warn_of_unknown(path, unknown_keys(config_dict, cls.known_keys(config_dict)))
            try:
                return super().from_dict(config_dict, **kwargs)
            except (ArithmeticError, TypeError, ValueError, StrictDataclassError) as error:
                if (path := kwargs.get("name_or_path")) is None:
                    raise
                raise ValueError(f"config.json of {path}: {error}") from error
        kinds = cls.kinds()
        wanted = config_dict.get("speculators_model_type")
        if wanted not in kinds:
            raise ValueError(f"speculators_model_type is {wanted!r}, but hf_spec reads only {sorted(kinds)}")
        return kinds[wanted].from_dict(config_dict, **kwargs)

    @classmethod
    def known_keys(cls, given: dict[str, Any]) -> Known:
        """Return the known keys of ``given``, the JSON of a config of this class."""
        more = {"quantization_config", "speculators_version"}
        own = {field.name for field in fields(cast(Any, cls))} | PASSING | more
        layers = given.get("transformer_layer_config")
        kind = layers.get("model_type", "llama") if isinstance(layers, dict) else "llama"
        inside = {**keys_of_layers(kind), **known("layer_types", "quantization_config", "sliding_window")}
        return known(*own) | {"transformer_layer_config": inside, "speculators_config": SPECULATORS_KEYS}

    @classmethod
    def kinds(cls) -> dict[str, type[SpeculatorConfig]]:
        """Map every ``speculators_model_type`` to its config: of subclasses, only those that name one themselves."""
        found = {cls.speculators_model_type: cls} if vars(cls).get("speculators_model_type") else {}
        for kind in cls.__subclasses__():
            found = kind.kinds() | found
        return found

    @property
    def layers(self) -> PreTrainedConfig:
        """Return the config of the decoder layers."""
        return cast(PreTrainedConfig, self.transformer_layer_config)

    @property
    def made_for(self) -> dict[str, Any]:
        """Return what the file says of the target: ``name_or_path`` and ``architectures``, sizes if it knows them."""
        return dict((self.speculators_config or {}).get("verifier") or {})

    @property
    def num_speculative_tokens(self) -> int:
        """Return the chain length that the default proposal method asks for."""
        method = self._default_method()
        return int(method.get("speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS))

    @property
    def settings(self) -> SpeculationConfig:
        """Return what the default proposal method asks for, lossless: the looser acceptance waits to be asked for."""
        method = self._default_method()
        return SpeculationConfig(
            num_speculative_tokens=self.num_speculative_tokens,
            accept_k=method.get("verifier_accept_k"),
            accept_tolerance=min(1.0, method.get("accept_tolerance") or 0.0),  # of a probability
        )

    @classmethod
    def for_target(cls, target: PreTrainedConfig, layers: dict[str, Any] | None = None, **flags: Any) -> Any:
        """Describe a new draft for the target with config ``target``.

        ``layers`` replaces fields of the draft's decoder layers. By default they are one llama layer (qwen3 for a
        qwen3 target) of the target's width. ``flags`` are fields of this config. A ``draft_vocab_size`` above the
        target's is cut to that, with a warning. Errors: see ``check_target``; also where ``max_position_embeddings``
        is below the target's, because other engines fail beyond it.
        """
        cut_draft_vocabulary(flags, target)
        config = cls(
            transformer_layer_config=layers_for_target(target, **layers or {}),
            **{"speculators_config": default_speculators_config(cls.speculators_model_type, target)} | flags,
        )
        config.check_target(target)
        have = config.layers.max_position_embeddings
        if have < (need := max_positions(target)):
            raise ValueError(
                f"max_position_embeddings is {have}, below the target's {need}: vLLM and SGLang fail on longer text; "
                f"set {need}"
            )
        return config

    def _check_width(self, target: PreTrainedConfig) -> None:
        """Raise a ValueError unless a draft that reads the target's last hidden state is as wide as that."""
        have, need = self.layers.hidden_size, target.get_text_config().hidden_size
        if have != need:
            raise ValueError(
                f"hidden_size is {have}, but the target's is {need}: the draft was made for another target; use that "
                "one or train a draft for this one"
            )

    @property
    def shape(self) -> str:
        """Say in a few words what the draft is made of."""
        return f"{self.layers.num_hidden_layers} {self.layers.model_type} layer(s)"

    def describe(self) -> dict[str, str]:
        """Return what a person wants to know of the config, by a word for each line."""
        layers = self.layers
        return {"positions": f"{layers.max_position_embeddings}, rope {layers.rope_parameters}"}

    def check_target(self, target: PreTrainedConfig) -> None:
        """Raise a ValueError that names field, value and cure if this draft cannot serve a target with this config."""
        self.check_vocabulary(target)

    def check_vocabulary(self, target: PreTrainedConfig) -> None:
        """Raise a ValueError unless the draft knows the tokens of a target with this config."""
        have, need = self.layers.vocab_size, target.get_text_config().vocab_size
        if have != need:
            raise ValueError(
                f"the draft's vocab_size is {have}, but the target has {need} tokens: the draft was made for another "
                "target; use that one or train a draft for this one"
            )

    def warn_of_another(self, target: PreTrainedConfig) -> None:
        """Warn once if the draft was made for a target of other sizes, which this one fits all the same."""
        if other := another_target(self.made_for, target):
            logger.warning_once(
                f"{other}. Hardly a draft token will be accepted: use that target, or train a draft for this one"
            )

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Return the config of the decoder layers, which is what caches and masks ask for."""
        return self.layers

    def to_diff_dict(self) -> dict[str, Any]:
        """Write every field of the decoder layers: not all readers know transformers' defaults."""
        config = super().to_diff_dict()
        if self.transformer_layer_config is None:
            del config["transformer_layer_config"]
            return config
        layers = self.layers.to_diff_dict()
        layers.pop("transformers_version")
        return config | {"transformer_layer_config": layers}

    def validate(self) -> None:
        """Check every field; runs on construction and before saving."""
        super().validate()  # type: ignore[misc]  # made by a decorator
        if self.speculators_model_type != type(self).speculators_model_type:
            raise ValueError(
                f"speculators_model_type is {self.speculators_model_type!r}, but a {type(self).__name__} is "
                f"{type(self).speculators_model_type!r}; load it with AutoConfig"
            )
        if self.tie_word_embeddings:
            raise ValueError(
                "tie_word_embeddings is True: the input and output vocabularies of a draft differ; set False"
            )
        self._check_layers()
        self._check_speculators_config()
        shared = self.shared_with_target
        if not isinstance(shared, list) or not set(shared) <= {"embed_tokens", "lm_head"}:
            raise ValueError(f"shared_with_target is {shared!r}; it lists 'embed_tokens', 'lm_head', both or neither")

    def _check_layer_type(self) -> None:
        given = self.transformer_layer_config
        if not isinstance(given, dict | PreTrainedConfig | None):
            raise TypeError(
                f"transformer_layer_config is a {type(given).__name__}; pass a config of transformers or its dict"
            )
        name = given.get("model_type", "llama") if isinstance(given, dict) else getattr(given, "model_type", "llama")
        if name not in self.layer_model_types:
            raise ValueError(
                f"transformer_layer_config.model_type is {name!r}; build the draft from one of "
                f"{self.layer_model_types} (the target may be any architecture)"
            )

    def _check_layers(self) -> None:
        layers = self.layers
        if layers.model_type == GEMMA:
            self._check_gemma()
        for name, most in (dict.fromkeys(LAYER_SIZES, MOST_WIDE) | {"num_hidden_layers": MOST_LAYERS}).items():
            if is_int(size := getattr(layers, name, 1)) and not 1 <= size <= most:
                raise ValueError(f"transformer_layer_config.{name} is {size}; set a whole number of 1 to {most:,}")
        for name in ("sliding_window", "max_position_embeddings"):
            if (value := getattr(layers, name, None)) is not None and not (is_int(value) and value >= 1):
                raise ValueError(f"transformer_layer_config.{name} is {value!r}; set a whole number of at least 1")
        check_positive("transformer_layer_config.rms_norm_eps", getattr(layers, "rms_norm_eps", None))
        heads, kv_heads = (getattr(layers, f"num_{kind}_heads", 1) for kind in ("attention", "key_value"))
        if is_int(heads) and is_int(kv_heads) and heads % kv_heads:
            raise ValueError(
                f"transformer_layer_config.num_attention_heads is {heads}; set a multiple of num_key_value_heads, "
                f"{kv_heads}"
            )
        for name in ("hidden_act", "hidden_activation"):
            if isinstance(act := getattr(layers, name, None), str) and act not in ACT2FN:
                raise ValueError(f"transformer_layer_config.{name} is {act!r}; transformers knows {sorted(ACT2FN)}")
        self._check_rope()
        kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
        if len(kinds) != layers.num_hidden_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise ValueError(
                f"transformer_layer_config.layer_types is {kinds}; name 'full_attention' or 'sliding_attention' for "
                f"each of the {layers.num_hidden_layers} layers"
            )
        self._check_window(kinds)

    def _check_window(self, kinds: list[str]) -> None:
        if "sliding_attention" in kinds and not getattr(self.layers, "sliding_window", None):
            raise ValueError(
                "transformer_layer_config.sliding_window is not set, but a layer is sliding_attention; set it"
            )

    def _check_rope(self) -> None:
        if self.layers.model_type not in self.layer_model_types:
            return  # whose rope may be one per kind of layer, or partial
        rope: dict[str, Any] = self.layers.rope_parameters
        if partial := self.layers.model_type == GEMMA:  # one rope for each kind of layer, of which drafts have one
            rope = rope.get("full_attention") or {}
        kind, is_nested = rope.get("rope_type"), any(isinstance(value, dict) for value in rope.values())
        if is_nested or (kind != "default" and kind not in ROPE_INIT_FUNCTIONS):
            raise ValueError(
                f"transformer_layer_config.rope_parameters is {rope}; describe one rope for all layers, whose "
                f"rope_type is 'default', {', '.join(map(repr, ROPE_INIT_FUNCTIONS))}"
            )
        check_positive("transformer_layer_config.rope_parameters: rope_theta", rope.get("rope_theta"))
        if not partial and kind != "default" and rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(
                f"transformer_layer_config.rope_parameters is {rope}, but {self.layers.model_type} layers rotate "
                "all of a head: drop partial_rotary_factor"
            )

    def _check_gemma(self) -> None:
        """Raise a ValueError for what Gemma 4 has and drafts of its layers have not."""
        layers = self.layers
        given = {name: value for name in GEMMA_ONLY if (value := getattr(layers, name))}
        if layer_by_layer := layers.to_diff_dict().get("per_layer_config"):
            given["per_layer_config"] = layer_by_layer
        if "sliding_attention" in layers.layer_types:
            given["layer_types"] = layers.layer_types
        for name, value in given.items():
            raise ValueError(
                f"transformer_layer_config.{name} is {value!r}: drafts of {GEMMA} layers have full attention of one "
                "shape and no more; use a draft of another kind of layers"
            )

    def _check_speculators_config(self) -> None:
        given = self.speculators_config
        if not isinstance(given, dict):
            raise TypeError(f"speculators_config is a {type(given).__name__}; pass a dict or None for the defaults")
        if given.get("algorithm") != self.speculators_model_type:
            raise ValueError(
                f"speculators_config.algorithm is {given.get('algorithm')!r}, but speculators_model_type is "
                f"{self.speculators_model_type!r}; make them equal"
            )
        methods = given.get("proposal_methods")
        if not isinstance(methods, list) or not methods or not all(isinstance(method, dict) for method in methods):
            raise ValueError(
                f"speculators_config.proposal_methods is {methods!r}; list at least one dict such as "
                "{'proposal_type': 'greedy', 'speculative_tokens': 5}"
            )
        for method in methods:
            count = method.get("speculative_tokens", DEFAULT_NUM_SPECULATIVE_TOKENS)
            if not (is_int(count) and count >= 1):
                raise ValueError(f"speculative_tokens in {method!r} is {count!r}; give a whole number of at least 1")
            if (k := method.get("verifier_accept_k")) is not None and not (is_int(k) and k >= 1):
                raise ValueError(f"verifier_accept_k in {method!r} is {k!r}; give a whole number of at least 1")
            loose = method.get("accept_tolerance")
            if loose is not None and not (isinstance(loose, int | float) and loose >= 0):
                raise ValueError(f"accept_tolerance in {method!r} is {loose!r}; give a number of at least 0")
        verifier = given.get("verifier")
        if not (isinstance(verifier, dict) and isinstance(verifier.get("name_or_path"), str | None)):
            raise TypeError(
                f"speculators_config.verifier is {verifier!r}; name the target as "
                "{'name_or_path': 'org/model' or None, 'architectures': [...]}"
            )
        self._default_method()

    def _default_method(self) -> dict[str, Any]:
        given = cast(dict[str, Any], self.speculators_config)
        name, methods = given.get("default_proposal_method"), given["proposal_methods"]
        for method in methods:
            if method.get("proposal_type") == name:
                return cast(dict[str, Any], method)
        raise ValueError(
            f"speculators_config.default_proposal_method is {name!r}; name one of "
            f"{[method.get('proposal_type') for method in methods]}"
        )


def check_positive(name: str, value: Any) -> None:
    """Raise a ValueError for a ``value`` of the field ``name`` that is neither None nor a positive number."""
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}; set a positive number")


def default_speculators_config(kind: str, target: PreTrainedConfig | None = None) -> dict[str, Any]:
    """Return what ``speculators_config`` holds for a new draft of ``target``: greedy chains of five."""
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": DEFAULT_NUM_SPECULATIVE_TOKENS,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {
            "name_or_path": hub_name(target.name_or_path) if target else None,
            "architectures": list((target and target.architectures) or []),
            **(sizes_of(target) if target else {}),
        },
    }


def sizes_of(target: PreTrainedConfig) -> dict[str, int]:
    """Return by name what tells a target from others of its vocabulary."""
    text = target.get_text_config()
    return {name: size for name in TARGET_SIZES if is_int(size := getattr(text, name, None))}


def another_target(made_for: dict[str, Any], target: PreTrainedConfig) -> str:
    """Say how ``target`` differs from what a draft was made for; "" if it does not, or if the draft does not say."""
    sizes = sizes_of(target)
    known = {name: size for name in TARGET_SIZES if name in sizes and is_int(size := made_for.get(name))}
    if all(sizes[name] == size for name, size in known.items()):
        return ""
    theirs, ours = (
        " and ".join(f"{name} {one[name]}" for name in known if known[name] != sizes[name]) for one in (known, sizes)
    )
    name, own = made_for.get("name_or_path") or "another target", target.name_or_path or f"a {type(target).__name__}"
    return f"the draft was made for {printable(name)} with {theirs}, and this is {own} with {ours}"


def hub_name(path: str | None) -> str | None:
    """Return ``path`` if it may be a name on the Hub: none of this machine, and at most one slash."""
    return path if path and path.count("/") <= 1 and not is_local(path) else None


def is_local(path: str) -> bool:
    """Tell whether ``path`` says where something is on this machine, which is nobody else's business."""
    return path[:1] in {*"./~"} or "\\" in path or os.path.exists(path)


def cut_draft_vocabulary(flags: dict[str, Any], target: PreTrainedConfig) -> None:
    """Set a ``draft_vocab_size`` among ``flags`` that is above the target's vocabulary to that, with a warning."""
    size, whole = flags.get("draft_vocab_size"), target.get_text_config().vocab_size
    if is_int(size) and size > whole:
        logger.warning(
            f"draft_vocab_size is {size}, but the target has {whole} tokens: the draft predicts all of them"
        )
        flags["draft_vocab_size"] = whole


def max_positions(target: PreTrainedConfig) -> int:
    """Return how many positions a target is made for; 0 if it does not say."""
    return getattr(target.get_text_config(), "max_position_embeddings", None) or 0


def one_layer(text: PreTrainedConfig) -> Any:
    """Return what ``text`` says of its first layer: some models have heads of several sizes."""
    return text.per_layer_config[0] if text.is_heterogeneous else text


def layers_for_target(target: PreTrainedConfig, **replace: Any) -> PreTrainedConfig:
    """Return a config for one decoder layer of the shape of ``target``'s, with some fields replaced."""
    text = target.get_text_config()
    layer = one_layer(text)
    shape: dict[str, Any] = {
        name: value
        for name in ("hidden_act", "max_position_embeddings", "rms_norm_eps", *LAYER_SIZES)
        if (value := getattr(layer, name, None)) is not None
    }
    rope = getattr(text, "rope_parameters", None) or {}
    rope = dict(rope.get("full_attention", rope) or {})  # some models have one rope per kind of layer
    rope.pop("partial_rotary_factor", None)  # the draft's layers rotate all of a head
    plain = {"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)}
    shape["rope_parameters"] = rope if rope.get("rope_type") in ("linear", "llama3", "yarn") else plain
    if isinstance(widths := shape.get("intermediate_size"), list):  # one per layer
        shape["intermediate_size"] = max(widths)
    # What has no attention or no such layers of its own gets common proportions instead of the layer's defaults.
    shape.setdefault("intermediate_size", 4 * text.hidden_size)
    shape.setdefault("num_attention_heads", max(1, text.hidden_size // 64))
    kind, heads = "qwen3" if text.model_type.startswith("qwen3") else "llama", shape["num_attention_heads"]
    if kind == "llama" and text.hidden_size % heads:  # which transformers refuses (GLM-4.5: 96 heads of 128 in 5120)
        heads = math.gcd(text.hidden_size, text.hidden_size // shape.get("head_dim", 64))
        shape |= {
            "num_attention_heads": heads,
            "num_key_value_heads": math.gcd(heads, shape.get("num_key_value_heads", 0)),
        }
    shape |= {"model_type": kind, "num_hidden_layers": 1} | replace
    return AutoConfig.for_model(**{"num_key_value_heads": shape["num_attention_heads"]} | shape)
