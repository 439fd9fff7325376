"""What all draft models share: weights lent by the target, a draft vocabulary, masks, and strict loading."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..bundle import auto_map, code_files, remove_code
from ..configuration import GEMMA, SpeculatorConfig
from ..policy.cost import ModelShape, shape_of
from ..scoring.masks import full_masks, why_no_masks
from ..scoring.names import CACHE
from ..scoring.plain import input_device
from ..settings import SpeculationConfig
from ..untrusted import check_ends, printable
from ..whole_files import write_files
from .autoregressive import AutoregressiveDrafter
from .base import DraftContext, Drafter, Speculator
from .files import Checkpoint, Files, Format, check_pickled
from .layers import classes_of, with_torch_norms
from .lending import Lent, lendable
from .reports import without_report
from .static import StaticDrafter, drafter_for

if TYPE_CHECKING:
    from ..unroll.feedback import Unrolled, UnrollInput

SPARE_VALUES = 10_000_000  # values that a config may describe beyond twice the file's, before it is refused unread
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
MASKS = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}


class DraftModel(PreTrainedModel, Speculator):
    """A model of transformers that drafts for another one.

    A draft without its own ``embed_tokens`` or ``lm_head`` (``config.shared_with_target``) uses those of the target
    that ``bind`` is given. They are never registered, moved, trained or saved with the draft.

    A kind of draft is a subclass in a folder of its own. It declares its config, its ``forward``, and the drafter that
    calls that (``drafter_class``). It names the files that it reads (``formats``), and the layouts of other projects
    in which it is written (``layouts``). It also declares which engines serve it (``engines``, ``vllm_method``), and
    how it is unrolled in training (``unroll``).
    """

    config_class: Any
    config: Any
    formats: ClassVar[tuple[Format, ...]] = ()
    layouts: ClassVar[Mapping[str, Callable[[Any], Files]]] = {}
    needs_anchors: ClassVar[bool] = False  # whether it drafts blocks, which are trained from selected positions only
    vllm_method: ClassVar[str | None] = None  # the method in vLLM's --speculative-config
    vllm_settings: ClassVar[dict[str, Any]] = {}  # and what else stands there
    supports_gradient_checkpointing = False  # it would drop the cache, which later training steps read
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = True
    _supports_attention_backend = True
    _skip_keys_device_placement = ["past_key_values", CACHE]  # noqa: RUF012
    _no_split_modules: list[str] = ["LlamaDecoderLayer", "Qwen3DecoderLayer", "Gemma4DraftLayer"]  # noqa: RUF012

    _with_code = False  # while ``push_to_hub`` saves with code

    drafter_class: ClassVar[type[StaticDrafter]] = AutoregressiveDrafter
    num_modules = 1  # see AutoregressiveDrafter
    ends_chains: ClassVar[bool] = False  # its drafters ask ``DraftContext.keep_drafting`` after each token of a chain
    layers: nn.ModuleList
    d2t: Tensor | None
    t2d: Tensor | None

    def __init__(self, config: SpeculatorConfig, draft_vocab_size: int) -> None:
        super().__init__(config)
        layers = config.layers
        layers._attn_implementation = config._attn_implementation  # transformers sets these where a sub-model is built
        layers._experts_implementation = config._experts_implementation
        if "sliding_attention" in (getattr(layers, "layer_types", None) or ()) and layers.model_type == "llama":
            self._supports_flash_attn = False  # llama's attention does not pass windows to the kernel
        self._add_ends(layers, draft_vocab_size)
        vocabulary = layers.vocab_size or 0
        reduced = draft_vocab_size < vocabulary
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long) if reduced else None)
        self.register_buffer("t2d", torch.arange(vocabulary) < draft_vocab_size if reduced else None)
        self._lent = Lent()

    def post_init(self) -> None:
        """Finish construction; a subclass calls this at the end of its ``__init__``."""
        with_torch_norms(self)
        super().post_init()  # type: ignore[no-untyped-call]

    @property
    def layer_config(self) -> PreTrainedConfig:
        """Return the config that the decoder layers, their masks and their cache are made from."""
        return cast(PreTrainedConfig, self.config.layers)

    def _add_ends(self, layers: Any, draft_vocab_size: int) -> None:
        """Add what is before and after the decoder layers: embeddings, head, rotary embedding."""
        self._add_own_ends(layers, draft_vocab_size)
        self.rotary_emb = classes_of(layers.model_type).rotary(layers)

    def _add_own_ends(self, layers: Any, draft_vocab_size: int) -> None:
        """Add the embeddings and the head, unless they are the target's."""
        shared, size = self.config.shared_with_target or (), layers.hidden_size
        self.embed_tokens = None if "embed_tokens" in shared else nn.Embedding(layers.vocab_size, size)
        self.lm_head = None if "lm_head" in shared else nn.Linear(size, draft_vocab_size, bias=False)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if self.config.layers.model_type == GEMMA:  # whose buffers transformers does not initialise
            if module is self.rotary_emb:
                cast(Any, module).fill()
            elif isinstance(scalar := getattr(module, "layer_scalar", None), Tensor):
                init.ones_(scalar)

    @property
    def device(self) -> torch.device:
        """Return the draft's device: the CPU if all its modules are of torch.ao, which show no parameters."""
        return next((tensor.device for tensor in chain(self.parameters(), self.buffers())), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the draft computes in."""
        return next((one.dtype for one in self.parameters() if one.is_floating_point()), torch.float32)

    def get_input_embeddings(self) -> Any:
        """Return this draft's own embeddings; None if it borrows the target's."""
        return self.embed_tokens

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the tokens are those of the target."""
        raise ValueError("a draft has the vocabulary of its target: train one for the target with the new tokens")

    @property
    def output_layers(self) -> list[nn.Module]:
        """Return this draft's own layers that end in its vocabulary; none if it borrows the target's."""
        return [] if self.lm_head is None else [self.lm_head]

    @property
    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the draft's own parameters between trained states and losses."""
        return [parameter for layer in self.trained_heads for parameter in layer.parameters()]

    @property
    def trained_heads(self) -> list[nn.Module]:
        """Return the draft's own layers between trained states and logits."""
        return self.output_layers

    @property
    def target_ids(self) -> Tensor | None:
        """Return the target's id of each token of the draft, (draft vocabulary,); None if vocabularies are equal."""
        return None if self.d2t is None else self.to_target_ids(torch.arange(len(self.d2t), device=self.d2t.device))

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Map ids of the draft vocabulary, of any shape, to ids of the target's."""
        return ids if self.d2t is None else ids + self.d2t[ids]

    def over_target(self, logits: Tensor) -> Tensor:
        """Spread logits (..., draft vocabulary) over the target's vocabulary; other tokens get -inf."""
        if (ids := self.target_ids) is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.config.layers.vocab_size), -torch.inf)
        return whole.index_copy(-1, ids, logits)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Set the draft vocabulary to the target's tokens ``ids`` (draft vocabulary,), which must ascend."""
        if self.d2t is None or self.t2d is None:
            raise ValueError("this draft predicts the whole vocabulary: set draft_vocab_size to reduce it")
        if ids.shape != self.d2t.shape:
            raise ValueError(f"ids has shape {tuple(ids.shape)}; this draft predicts {len(self.d2t)} tokens")
        _check_ids(ids, len(self.t2d))
        ids = ids.to(self.d2t)
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids] = True

    def bind(self, target: PreTrainedModel) -> None:
        """Borrow from ``target`` what this draft has no weights for; a ValueError says why it cannot.

        A deep copy of the draft borrows the same weights; a pickle holds none of the target's.
        """
        self.check(target)
        lent = Lent()
        shared = self.config.shared_with_target or ()
        if "embed_tokens" in shared:
            lent["embed_tokens"] = lendable(target.get_input_embeddings(), "embed_tokens", self.config)
        if "lm_head" in shared:
            head, ids = target.get_output_embeddings(), self.target_ids
            weight, bias = lendable(head, "lm_head", self.config), getattr(head, "bias", None)
            if ids is not None:
                # A look-up, because of packed weights: see hf_spec.pack.
                weight = functional.embedding(ids.to(weight.device), weight.detach())
                bias = None if bias is None else bias[ids.to(bias.device)]
            lent.update({"lm_head": weight, "lm_head_bias": bias})
        self._lent = lent  # in one assignment: another thread may be drafting

    def keep_borrowed(self) -> None:
        """Copy the weights that the target of ``bind`` lends; they become the draft's own and are saved with it.

        Errors: a ValueError if nothing was lent, or if the output layer has a bias, which a draft has no place for.
        """
        shared = self.config.shared_with_target or ()
        if "lm_head" in shared and self._lent.get("lm_head_bias") is not None:
            raise ValueError("the target's output layer has a bias, which a draft has no place for: leave it shared")
        if "embed_tokens" in shared:
            own = self._borrowed("embed_tokens").clone().to(self.device, self.dtype)
            self.embed_tokens = nn.Embedding.from_pretrained(own)
        if "lm_head" in shared:
            own = self._borrowed("lm_head").clone().to(self.device, self.dtype)
            self.lm_head = nn.Linear(own.shape[1], own.shape[0], bias=False, device=own.device, dtype=own.dtype)
            self.lm_head.weight = nn.Parameter(own, requires_grad=False)
        self.config.shared_with_target, self._lent = [], Lent()

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embed tokens of the target, (batch, length) -> (batch, length, hidden)."""
        if self.embed_tokens is not None:
            embeds = cast(Tensor, self.embed_tokens(input_ids))
        else:
            weight = self._borrowed("embed_tokens")
            embeds = functional.embedding(input_ids.to(weight.device), weight).to(input_ids.device, self.dtype)
        if self.config.layers.model_type != GEMMA:
            return embeds
        return embeds * torch.tensor(self.config.layers.hidden_size**0.5, dtype=embeds.dtype)  # rounded as in Gemma

    def logits(self, hidden: Tensor) -> Tensor:
        """Turn hidden states (..., hidden) into logits over the draft vocabulary."""
        if self.lm_head is not None:
            logits = cast(Tensor, self.lm_head(hidden))
        else:
            weight = self._borrowed("lm_head")
            moved = hidden.to(weight.device, weight.dtype)
            logits = functional.linear(moved, weight, self._lent["lm_head_bias"]).to(hidden.device)
        return softcapped(logits, getattr(self.config.layers, "final_logit_softcapping", None))  # of Gemma

    def decode(
        self,
        hidden: Tensor,
        for_first_layer: tuple[Tensor, ...],
        position_ids: Tensor | None,
        attention_mask: Any,
        past_key_values: Cache | None,
    ) -> Tensor:
        """Run the decoder layers on ``hidden`` (batch, length, hidden); the first one with more inputs.

        ``position_ids`` (batch or 1, length) continue after the cache by default. ``attention_mask`` is what any model
        of transformers takes, or a dict of masks by kind of layer.
        """
        position_ids = next_positions(hidden, past_key_values) if position_ids is None else position_ids
        masks = self._masks(hidden, attention_mask, position_ids, past_key_values)
        rotary = self.rotary_emb(hidden, position_ids)
        for layer, mask in zip(self.layers, masks, strict=True):
            hidden = layer(
                hidden,
                *for_first_layer,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=rotary,
                **{CACHE: past_key_values},
            )
            for_first_layer = ()
        return hidden

    def _masks(
        self, hidden: Tensor, attention_mask: Any, position_ids: Tensor, past_key_values: Cache | None
    ) -> list[Any]:
        layers = self.config.layers
        kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
        cache: dict[str, Any] = {CACHE: past_key_values}
        if not isinstance(attention_mask, dict):
            if {*kinds} == {"full_attention"} and (known := full_masks(len(kinds), layers._attn_implementation)):
                return known
            attention_mask = {
                kind: MASKS[kind](
                    config=layers,
                    inputs_embeds=hidden,
                    attention_mask=attention_mask,
                    position_ids=position_ids,
                    **cache,
                )
                for kind in dict.fromkeys(kinds)
            }
        return [attention_mask[kind] for kind in kinds]

    def drafter(self, request: DraftContext) -> Drafter:
        self.bind(request.target)
        return drafter_for(self.drafter_class, self, request)

    def check(self, target: PreTrainedModel, config: SpeculationConfig | None = None) -> None:
        if target.config.is_encoder_decoder:
            raise ValueError(
                f"the draft {type(self).__name__} reads hidden states of decoder-only targets, and "
                f"{type(target).__name__} is an encoder-decoder model, whose source the draft's layers cannot attend "
                "to; use a smaller model of the target's kind, a decoder that shares its encoder, or 'ngram'"
            )
        self.config.check_target(target.config)
        if (reason := why_no_masks(self.config._attn_implementation)) is not None:
            raise ValueError(f"the draft {type(self).__name__} {reason}")
        if input_device(target).type == "meta":  # a target without weights yet; it is checked again once it is loaded
            return
        ends = {"embed_tokens": target.get_input_embeddings(), "lm_head": target.get_output_embeddings()}
        for name in self.config.shared_with_target or ():
            lendable(ends[name], name, self.config)
        self.config.warn_of_another(target.config)  # last: a draft that is refused needs no warning

    @classmethod
    def engines(
        cls, config: Any, checkpoint: Checkpoint | None = None, layout: str = "speculators"
    ) -> dict[str, list[str]]:
        """List by engine why it cannot serve such a draft; by default no engine knows the kind.

        With ``checkpoint`` in ``layout``: empty if the engine reads these files as they were meant. Without: the
        reasons that remain in any layout.
        """
        kind = cls.config_class.speculators_model_type
        return {engine: [f"does not know drafts of kind {kind!r}"] for engine in ("vLLM", "SGLang", "llama.cpp")}

    @classmethod
    def use_in_vllm(cls, config: Any, target: str, path: str) -> str:
        """Say in Markdown how vLLM serves the draft at ``path`` for ``target``."""
        if cls.vllm_method is None:
            return f"vLLM does not serve drafts of this kind ({config.speculators_model_type})."
        return vllm_command(cls.vllm_method, target, path, config.num_speculative_tokens, **cls.vllm_settings)

    def unroll(self, given: UnrollInput, steps: int, recompute: bool = False) -> Unrolled:
        """Draft ``steps`` tokens from every position of a text at once, for training.

        ``recompute`` keeps only the inputs and outputs of a step (gradient checkpointing). A draft that is fed its own
        output needs only its ``forward`` for this.
        """
        from ..unroll.feedback import unroll_with_feedback  # compiles kernels, which only training needs

        return unroll_with_feedback(self, given, steps, recompute)

    def unroll_steps(self, wanted: int) -> int:
        """Return how many steps are trained if ``wanted`` are asked for."""
        return wanted

    def sort_features(self) -> None:
        """Read the same hidden states in ascending order from now on, because other projects' readers sort them."""

    @property
    def supports_early_stop(self) -> bool:
        """Tell whether chains end where ``DraftContext.keep_drafting`` says so: on a CPU, where looking is free."""
        return self.ends_chains and self.device.type == "cpu"

    def draft_work(self, target: PreTrainedModel) -> Callable[[int], Sequence[ModelShape]]:
        """List one forward for each draft token of a draft that is fed its own output, else one for all."""
        shapes, is_fed = [shape_of(self)], self.ends_chains
        return lambda length: shapes * (length if is_fed else min(length, 1))

    def defaults(self) -> SpeculationConfig:
        settings: SpeculationConfig = self.config.settings
        return settings

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load like any model of transformers, but strictly.

        Errors: a ValueError that lists tensors which are missing, left over, of the wrong shape or not finite. It also
        names an unusable ``d2t``. An OSError for files that are missing or cut off.
        """
        _check_size(cls, pretrained_model_name_or_path, kwargs)
        wants_info = kwargs.pop("output_loading_info", False)
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # reported below, all at once
        try:
            with without_report():
                loaded: Any = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"a weight file of {pretrained_model_name_or_path} is cut off or damaged ({error}); copy or download "
                "it again"
            ) from error
        model, info = loaded
        model.check_weights(info)
        return (model, info) if wants_info else model

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save like any model of transformers.

        With ``with_code=True`` the folder holds the code, too. Where hf_spec is not installed, ``AutoModel`` reads the
        draft with ``trust_remote_code=True``, and the folder's ``custom_generate/`` decodes with it. Without it, such
        files of an earlier call are removed. Layers that the draft reads in no ascending order are sorted first, with
        the weights that read them.

        Errors: those of transformers; a ValueError if the draft's code cannot be brought along.
        """
        if (args[1] if len(args) > 1 else kwargs.get("state_dict")) is None:  # those are in the present order
            self.sort_features()
        with_code = kwargs.pop("with_code", False) or self._with_code or self.config.code is not None
        is_main = kwargs.get("is_main_process", not args or args[0])
        if not with_code:
            super().save_pretrained(save_directory, *args, **kwargs)
            if is_main:
                remove_code(save_directory)
            return
        if kwargs.get("push_to_hub"):
            raise ValueError("with_code: save_pretrained does not upload the code; use push_to_hub(with_code=True)")
        files = code_files(type(self))
        if is_main:
            write_files(files, save_directory)
        with self._naming_its_code():  # the config comes last, so that it never names code that is not there
            super().save_pretrained(save_directory, *args, **kwargs)

    def push_to_hub(self, *args: Any, with_code: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        """Upload like any model of transformers; ``with_code`` as in ``save_pretrained``."""
        self._with_code = with_code
        try:
            return super().push_to_hub(*args, **kwargs)
        finally:
            self._with_code = False

    @contextlib.contextmanager
    def _naming_its_code(self) -> Iterator[None]:
        """Let the config name the classes of the code while it is written."""
        before = getattr(self.config, "auto_map", None)
        self.config.auto_map = auto_map(type(self))
        try:
            yield
        finally:
            if before is None:
                del self.config.auto_map
            else:
                self.config.auto_map = before

    def check_weights(self, info: dict[str, Any]) -> None:
        """Raise a ValueError if transformers' loading ``info``, a weight or the vocabulary is wrong."""
        problems = [f"{name} is missing" for name in sorted(info["missing_keys"])]
        problems += [f"{name} is not part of this draft" for name in sorted(info["unexpected_keys"])]
        problems += [
            f"{name} has shape {tuple(found)} instead of {tuple(wanted)}"
            for name, found, wanted in sorted(info["mismatched_keys"])
        ]
        problems += [
            f"{name} holds values that are not finite" for name, tensor in self.state_dict().items() if _broken(tensor)
        ]
        if problems:
            raise ValueError(
                f"these weights do not fit {type(self).__name__}: {printable('; '.join(problems))}. The config "
                "describes another draft than the weights, or the file was saved before its weights were set"
            )
        self.check_vocabulary()

    def check_vocabulary(self) -> None:
        """Raise a ValueError unless ``d2t`` and ``t2d`` name the same tokens, ascending."""
        ids, mask = self.target_ids, self.t2d
        if ids is None or mask is None or ids.is_meta:
            return
        _check_ids(ids, len(mask))
        if not torch.equal(mask.nonzero()[:, 0], ids):
            raise ValueError("t2d marks other tokens than d2t maps to; rebuild it as t2d[arange + d2t] = True")

    def _borrowed(self, name: str) -> Tensor:
        if (weight := self._lent.get(name)) is None:
            raise ValueError(f"this draft has no {name} of its own: call draft.bind(target) first")
        return weight.detach()


def _check_size(kind: type[DraftModel], path: Any, kwargs: dict[str, Any]) -> None:
    """Raise a ValueError if the config describes far more values than the files hold, before they are allocated."""
    if (tensors := kwargs.get("state_dict")) is not None:
        values = sum(tensor.numel() for tensor in tensors.values())
    else:
        folder = Path(path or "", kwargs.get("subfolder") or "")
        files = [] if path is None else [file for pattern in WEIGHTS for file in folder.glob(pattern)]
        if not files:
            return
        for file in files:
            check_ends(file)
            if file.suffix == ".bin":
                check_pickled(file)
        values = sum(file.stat().st_size for file in files)
    places = {name: kwargs[name] for name in ("subfolder", "revision") if name in kwargs}
    config = kwargs.get("config") or kind.config_class.from_pretrained(path, **places)
    with torch.device("meta"):
        skeleton: nn.Module = kind(copy.deepcopy(config))  # type: ignore[call-arg]  # kinds count their vocabulary
        described: int = sum(weight.numel() for weight in skeleton.parameters())
    if described > 2 * values + SPARE_VALUES:
        raise ValueError(
            f"the config{'' if path is None else f' of {path}'} describes a draft of {described:,} values, and the "
            f"weights hold at most {values:,}: one of the two belongs to another draft, or is cut off"
        )


def _check_ids(ids: Tensor, total: int) -> None:
    if not (ids[1:] > ids[:-1]).all() or ids[0] < 0 or ids[-1] >= total:
        raise ValueError(
            f"d2t maps to ids {ids[:3].tolist()}...{ids[-3:].tolist()}, which must ascend within 0..{total - 1}: "
            "d2t[i] is target id minus i, with the target ids sorted and distinct"
        )


def _broken(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter)  # quantised tensors may not know the operator
    return is_plain and tensor.is_floating_point() and not tensor.is_meta and not bool(tensor.isfinite().all())


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """Return ``logits`` squeezed into -``cap`` to ``cap``, or as they are without one."""
    return logits if cap is None else (logits / cap).tanh() * cap


def next_positions(hidden: Tensor, past_key_values: Cache | None) -> Tensor:
    """Return the positions of ``hidden`` (batch, length, ...) after the cache: (1, length)."""
    start = past_key_values.get_seq_length() if past_key_values is not None else 0
    return start + torch.arange(hidden.shape[1], device=hidden.device)[None]


def only_one(features: Tensor | None, hidden_states: Tensor | None) -> Tensor:
    """Return the one that is given; a ValueError unless it is exactly one."""
    if features is not None and hidden_states is None:
        return features
    if hidden_states is not None and features is None:
        return hidden_states
    raise ValueError("pass either features (first step) or hidden_states (later steps), and not both")


def vllm_command(method: str, target: str, path: str, num_speculative_tokens: int, **more: Any) -> str:
    """Return the command, in Markdown, by which vLLM serves ``target`` with the draft at ``path``."""
    setting = json.dumps({"method": method, "model": path, "num_speculative_tokens": num_speculative_tokens, **more})
    return f"In vLLM:\n\n```sh\nvllm serve {target} --speculative-config '{setting}'\n```"
