"""The drafter before its first step: random, a released folder, or the target's own last layers.

L target layers, D taps, H hidden.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from common.files import read_json
from common.fingerprint import require_equal
from configs.schema import Config
from data.features import FeatureSet
from drafter.config import DrafterConfig, drafter_config
from drafter.folder import load_drafter
from drafter.model import Drafter
from drafter.own_head import require_targets_own
from target.head import load_target_head
from target.load import target_folder
from train.freeze import frozen_names

TARGET_LAYERS = "target_layers"
PLAIN_FAMILIES = ("llama", "mistral", "qwen3")
"""Families whose layers are the drafter's: plain RMSNorm, rotate-half RoPE, SwiGLU. Others are refused, not approximated."""
REMEDY = "choose train.init_from: null or a drafter folder"
COPIED = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def initial_drafter(config: Config) -> Drafter:
    """A float32 drafter on the CPU, the same on every rank; what `train.freeze` names requires no gradient.

    Raises ValueError if `train.init_from` or `train.freeze` does not fit.
    """
    torch.manual_seed(config.run.seed)
    drafter = _unfrozen_drafter(config)
    frozen = frozen_names(config.train.freeze, [name for name, _ in drafter.named_parameters()])
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return drafter


def _unfrozen_drafter(config: Config) -> Drafter:
    wanted = drafter_config(config)
    if config.train.init_from is None:
        return Drafter(wanted)
    if config.train.init_from == TARGET_LAYERS:
        return from_target_layers(Drafter(wanted), wanted, target_folder(config.target))
    return from_folder(Path(config.train.init_from), wanted)


def from_folder(folder: Path, wanted: DrafterConfig) -> Drafter:
    """A released drafter, refused if any setting that shapes its function differs from the recipe's."""
    drafter = load_drafter(folder, "cpu", torch.float32)
    free = {"max_position_embeddings"}
    if drafter.config.num_target_layers is None:  # speculators' format does not say
        drafter.config = replace(drafter.config, num_target_layers=wanted.num_target_layers)
    require_equal(
        f"train.init_from={folder}",
        vars(drafter.config),
        {key: value for key, value in vars(wanted).items() if key not in free},
        "copy its values into the recipe's drafter section",
    )
    return drafter


def require_same_target(config: Config, features: FeatureSet) -> None:
    """Raises ValueError if a self-contained `train.init_from` folder carries another embedding or head than the features'."""
    source = config.train.init_from
    if source is not None and source != TARGET_LAYERS:
        require_targets_own(
            Path(source), lambda: load_target_head(features.checked_head(), "cpu", None)
        )


def from_target_layers(drafter: Drafter, config: DrafterConfig, target: Path) -> Drafter:
    """The target's last layers as the drafter's, its final norm as the norm before the head, the last tap as the context.

    A drafter of n layers takes target layers L-n..L-1. fc passes the last tap on, and hidden_norm does to it what the first
    copied layer's input norm would, so that keys and values of the context are nearly the target's own.

    q_norm and k_norm have no counterpart in Llama, and at 1 they would fix the scale of all logits: they are set to the RMS
    that queries and keys of the copied projections have on inputs of unit RMS, which keeps the target's scale.
    """
    tensors = TargetTensors(target)
    assert config.num_target_layers is not None, "a recipe states its target's layers"
    first = config.num_target_layers - config.num_layers
    if first < 0:
        raise ValueError(
            f"train.init_from={TARGET_LAYERS}: drafter.num_layers={config.num_layers} exceeds the target's "
            f"{config.num_target_layers} layers; {REMEDY}"
        )
    _require_same_layers(tensors.config, config)
    state = drafter.state_dict()
    for index in range(config.num_layers):
        for name in COPIED:
            _copy(state, f"layers.{index}.{name}", tensors, f"layers.{first + index}.{name}")
        for kind in ("q", "k"):
            _set_head_norm(state, index, kind, tensors, first + index)
    _copy(state, "norm.weight", tensors, "norm.weight")
    _copy(state, "hidden_norm.weight", tensors, f"layers.{first}.input_layernorm.weight")
    size, width = state["fc.weight"].shape
    state["fc.weight"].zero_()
    state["fc.weight"][:, width - size :] = torch.eye(size)
    return drafter


class TargetTensors:
    """A target folder's decoder tensors by name below the decoder stack, read one by one."""

    def __init__(self, folder: Path):
        self.config: dict[str, Any] = read_json(folder / "config.json", REMEDY)
        self._file_of: dict[str, tuple[Path, str]] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # a safe_open handle is no mapping
                    short = name.removeprefix("model.").removeprefix("language_model.")
                    self._file_of[short] = (file, name)

    def read(self, name: str) -> Tensor | None:
        """float32 on the CPU; None if the target has no such tensor."""
        if name not in self._file_of:
            return None
        file, full_name = self._file_of[name]
        with safe_open(file, "pt") as tensors:
            return tensors.get_tensor(full_name).float()


def _require_same_layers(target: dict[str, Any], config: DrafterConfig) -> None:
    """What equal shapes do not show: the kind of layer, and how queries and keys are rotated."""
    family = target.get("model_type")
    if family not in PLAIN_FAMILIES:
        raise ValueError(
            f"train.init_from={TARGET_LAYERS}: layers of model_type={json.dumps(family)} are not a drafter's "
            f"(known: {', '.join(PLAIN_FAMILIES)}); {REMEDY}"
        )
    rope = target.get("rope_parameters") or target.get("rope_scaling") or {}
    found = {
        "rope_theta": rope.get("rope_theta", target.get("rope_theta")),
        "rope_type": rope.get("rope_type", "default"),
        "head_dim": target.get("head_dim")
        or target["hidden_size"] // target["num_attention_heads"],
    }
    wanted = {
        "rope_theta": config.rope_theta,
        "rope_type": "default",
        "head_dim": config.head_dim,
    }
    what = f"train.init_from={TARGET_LAYERS}: the target"
    require_equal(what, found, wanted, f"set it in the drafter section, or {REMEDY}")


def _copy(state: dict[str, Tensor], name: str, tensors: TargetTensors, source: str) -> None:
    found = tensors.read(source)
    if found is None:
        raise ValueError(f"train.init_from={TARGET_LAYERS}: the target has no {source}; {REMEDY}")
    if found.shape != state[name].shape:
        raise ValueError(
            f"train.init_from={TARGET_LAYERS}: the target's {source} has shape {list(found.shape)}, the drafter's {name} "
            f"{list(state[name].shape)}; make the drafter section's sizes the target's, or {REMEDY}"
        )
    state[name].copy_(found)


def _set_head_norm(
    state: dict[str, Tensor], index: int, kind: str, tensors: TargetTensors, layer: int
) -> None:
    name = f"layers.{index}.self_attn.{kind}_norm.weight"
    found = tensors.read(f"layers.{layer}.self_attn.{kind}_norm.weight")
    if found is not None:
        state[name].copy_(found)
        return
    projection = state[f"layers.{index}.self_attn.{kind}_proj.weight"]  # (heads * E, H)
    inputs = state[
        f"layers.{index}.input_layernorm.weight"
    ]  # (H,): RMS of each input, after its norm
    state[name].fill_((projection * inputs).square().sum(1).mean().sqrt())
