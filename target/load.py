"""Load the frozen target: from a local folder or the hub, safetensors only, checked against the run's YAML.

Shapes: V vocabulary, H hidden.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from configs.schema import TargetSection

logger = logging.getLogger(__name__)

# A drafter sees the bare embedding and the bare head. A family that scales either, or caps the logits, would be served
# with other numbers than it was trained with, so it is refused: key of the text config -> its neutral value.
_NEUTRAL = {
    "final_logit_softcapping": None,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "lm_head_multiplier": 1.0,
}
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model"]


@dataclass(frozen=True)
class Target:
    """The frozen target, in eval mode, no gradients."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    hidden_size: int
    num_layers: int
    vocab_size: int
    layer_types: tuple[str, ...]
    """One per decoder layer, in HF's words: `full_attention`, `sliding_attention`, `linear_attention`."""
    dtype: torch.dtype
    device: torch.device
    """Where inputs go; with a device map, the embedding's device."""
    eos_token_ids: tuple[int, ...]

    @property
    def text_model(self) -> PreTrainedModel:
        """The decoder stack (it has `.layers`), also inside a `*ForConditionalGeneration`."""
        return self.model.get_decoder()

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers."""
        layers = self.text_model.layers
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def embed_tokens(self) -> Tensor:
        """(V, H), the model's own input embedding."""
        return _weight(self.model.get_input_embeddings())

    @property
    def lm_head(self) -> Tensor:
        """(V, H), the model's own output head; the embedding itself when tied."""
        return _weight(self.model.get_output_embeddings())


def load_target(
    section: TargetSection,
    device: torch.device | str,
    dtype: str | None = None,
    attention: str | None = None,
) -> Target:
    """The target of `section` on `device`, or spread by `section.device_map`.

    `dtype` and `attention` override the section's. Raises FileNotFoundError if the model is nowhere, ValueError if it is
    not what the YAML says or its family cannot be served with a drafter.
    """
    folder = target_folder(section)
    with _loading(section):
        config = AutoConfig.from_pretrained(folder)
    text_config = config.get_text_config()
    _check_sizes(section, text_config)
    _check_family(section, text_config)
    disable_progress_bar()
    set_verbosity_error()  # its table of missing tensors: _require_every_tensor says it
    with _loading(section):
        found: Any = _model_class(config).from_pretrained(  # its stubs know no pair
            folder,
            dtype=getattr(torch, dtype or section.dtype),
            attn_implementation=attention or section.attention,
            use_safetensors=True,
            device_map=section.device_map,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model: PreTrainedModel = found[0]
    _require_every_tensor(section, found[1])
    if section.device_map is None:
        nn.Module.to(model, torch.device(device))
    model.eval().requires_grad_(False)
    tokenizer = load_tokenizer(section)
    target = Target(
        model=model,
        tokenizer=tokenizer,
        hidden_size=section.hidden_size,
        num_layers=section.num_layers,
        vocab_size=section.vocab_size,
        layer_types=layer_types(text_config),
        dtype=model.dtype,
        device=_weight(model.get_input_embeddings()).device,
        eos_token_ids=eos_token_ids(section, tokenizer),
    )
    _check_ends(section, target)
    return target


def _model_class(
    config: PreTrainedConfig,
) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The text tower alone where transformers has one for the family (Qwen3.6), else the model with its vision tower."""
    has_text_tower = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if has_text_tower else AutoModelForImageTextToText


def load_tokenizer(section: TargetSection) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises ValueError if it has no chat template."""
    with _loading(section):
        tokenizer = AutoTokenizer.from_pretrained(target_folder(section))
    if tokenizer.chat_template is None:
        raise ValueError(
            f"target.model={section.model}: its tokenizer has no chat_template; use an instruction-tuned model or put a "
            "chat_template.jinja into its folder"
        )
    return tokenizer


def target_folder(section: TargetSection) -> Path:
    """The local folder of the target's files; a hub id is fetched into the hub's cache (read from it when offline)."""
    folder = Path(section.model)
    if folder.is_dir():
        return folder
    if section.prepare is not None:
        raise FileNotFoundError(
            f"target.model={section.model} does not exist yet; run the data stage of this recipe, which makes it "
            f"(target.prepare.kind={section.prepare.kind})"
        )
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", section.model):
        raise FileNotFoundError(
            f"target.model={section.model} is neither a folder here nor a hub id (owner/name); correct it"
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                section.model, revision=section.revision, allow_patterns=_HUB_FILES
            )
        )
    except (OSError, HFValidationError) as error:
        raise FileNotFoundError(
            f"target.model={section.model} (revision {section.revision}) is not a folder here and could not be fetched "
            f"from the hub: {type(error).__name__}; check the name, the network and HF_HUB_OFFLINE"
        ) from error


def layer_types(text_config: PreTrainedConfig) -> tuple[str, ...]:
    """One per decoder layer. Families without `layer_types` have one kind: sliding if the config states a window."""
    values = text_config.to_dict()
    if values.get("layer_types"):
        return tuple(values["layer_types"])
    kind = "full_attention" if values.get("sliding_window") is None else "sliding_attention"
    return (kind,) * values["num_hidden_layers"]


@contextlib.contextmanager
def _loading(section: TargetSection) -> Iterator[None]:
    """transformers raises many kinds for a folder or a setting it cannot use, without naming either; here they are one."""
    try:
        yield
    except (OSError, ValueError, TypeError, ImportError, SafetensorError) as error:
        raise ValueError(
            f"target.model={section.model} cannot be loaded: {error}; fetch or convert it again, or correct "
            "target.attention, target.device_map"
        ) from error


def _require_every_tensor(section: TargetSection, loaded: Mapping[str, Any]) -> None:
    """What a checkpoint lacks is drawn at random by transformers: labels and features of another model."""
    absent = [f"{name} is missing" for name in loaded["missing_keys"]]
    absent += [
        f"{name} is {tuple(found)}, not {tuple(wanted)}"
        for name, found, wanted in loaded["mismatched_keys"]
    ]
    if absent:
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        raise ValueError(
            f"target.model={section.model}: {min(absent)}{more}; its weights are not those of its config.json, fetch it "
            "again"
        )


def _check_sizes(section: TargetSection, text_config: PreTrainedConfig) -> None:
    found = {
        "hidden_size": text_config.hidden_size,
        "num_layers": text_config.num_hidden_layers,
        "vocab_size": text_config.vocab_size,
    }
    for key, value in found.items():
        stated = section.model_dump()[key]
        if value != stated:
            raise ValueError(
                f"target.{key}={stated}, but the model {section.model} has {value}; correct the recipe or target.model"
            )


def _check_family(section: TargetSection, text_config: PreTrainedConfig) -> None:
    values: Mapping[str, Any] = text_config.to_dict()
    for key, neutral in _NEUTRAL.items():
        if values.get(key, neutral) != neutral:
            raise ValueError(
                f"target.model={section.model} ({text_config.model_type}) has {key}={values[key]}: drafters are served "
                "with the plain embedding and head, so this family is not supported; choose another target"
            )


@torch.inference_mode()
def _check_ends(section: TargetSection, target: Target) -> None:
    """The bare embedding row is what enters layer 0, and head(last hidden state) is the model's own logits.

    Whatever a family calls its scalings, this sees them. Also catches heads and embeddings that were never loaded.
    """
    for name, weight in (("embedding", target.embed_tokens), ("head", target.lm_head)):
        if not weight.isfinite().all():
            raise ValueError(
                f"target.model={section.model}: its {name} holds NaN or infinity; the checkpoint is damaged, fetch it again"
            )
        if weight.shape != (target.vocab_size, target.hidden_size) or not weight.any():
            raise ValueError(
                f"target.model={section.model}: its {name} is {tuple(weight.shape)} or all zero, expected non-zero "
                f"({target.vocab_size}, {target.hidden_size}); the checkpoint is incomplete, fetch it again"
            )
    entered: list[Tensor] = []
    hook = target.layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: entered.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    ids = torch.arange(2, device=target.device)[None]
    try:
        hidden = target.text_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    logits = target.model(input_ids=ids, use_cache=False).logits.float()
    if not logits.isfinite().all():
        raise ValueError(
            f"target.model={section.model} gives logits that are not finite in {target.dtype}; its weights are damaged, "
            "fetch it again (or its numbers need target.dtype=float32)"
        )
    own = nn.functional.linear(hidden.to(target.lm_head.device), target.lm_head).float()
    embedded = target.embed_tokens[ids].to(entered[0].device)
    # bf16 rounds at 2^-8; a scaled embedding or head is off by far more than 5 %
    if (logits - own.to(logits.device)).norm() > 0.05 * logits.norm() or not torch.equal(
        entered[0], embedded
    ):
        raise ValueError(
            f"target.model={section.model} ({target.model.config.model_type}) scales its embedding or its logits: drafters "
            "are served with the plain embedding and head, so this family is not supported; choose another target"
        )


def eos_token_ids(section: TargetSection, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Where a response ends, as transformers and the servers decide; from the folder, no weights are read.

    Raises ValueError if the target names no such token.
    """
    folder = target_folder(section)
    if (folder / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(folder)
    else:
        generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(folder))
    stated = generation.eos_token_id
    if stated is None:
        stated = tokenizer.eos_token_id
    ids = [stated] if isinstance(stated, int) else list(stated or ())
    if not ids:
        raise ValueError(
            f"target.model={section.model} names no end-of-text token; set eos_token_id in its generation_config.json"
        )
    return tuple(int(i) for i in ids)


def _weight(module: nn.Module | None) -> Tensor:
    assert module is not None
    assert isinstance(module.weight, Tensor)
    return module.weight
