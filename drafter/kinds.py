"""Drafters of the DFlash family and others that this code does not run: recognised by what they carry, never half-loaded.

Their folders look like a plain DFlash drafter's with something added, and a reader that ignores additions loads them and
drafts badly. Sources, read for the names alone: z-lab's dflash 0.1.0, speculators 0.9.0, vLLM 0.33.0, SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from drafter.json_values import Values, shown


@dataclass(frozen=True)
class Kind:
    """A drafter of another kind, and what gives it away."""

    name: str
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    """Values of speculators_model_type."""
    keys: tuple[str, ...] = ()
    """Keys of config.json, at the top or in dflash_config, unless their value is null, false or 0."""
    tensors: tuple[str, ...] = ()
    """Parts of tensor names."""


OTHER_KINDS = (
    Kind(
        "DFlash2 (convolutions around each layer and a candidate selector)",
        ("DFlash2DraftModel", "DFlash2BeamDraftModel"),
        ("dflash2",),
        ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
        ("attention_conv.", "mlp_conv.", "candidate_selector."),
    ),
    Kind(
        "DSpark (a Markov head, blocks drafted from the anchor on)",
        ("DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel", "Qwen3OmniDSparkModel"),
        ("dspark",),
        ("markov_rank", "markov_head_type", "enable_confidence_head", "dspark_target_layer_ids"),
        ("markov", "confidence_head"),
    ),
    Kind(
        "XPress (a causal refiner)",
        ("XPressSpeculator", "Qwen3XPressModel"),
        ("xpress",),
        ("xpress_rank", "num_jacobi_passes"),
        ("refiner.", "xpress"),
    ),
    Kind(
        "Domino (a recurrent projector)",
        keys=("projector_type", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
        tensors=("prefix_gru.", "embed_proj."),
    ),
    Kind("LiLiCorr", ("LiLiCorrDraftModel",)),
    Kind("Laguna's DFlash (gated attention)", ("DFlashLagunaForCausalLM",), tensors=(".g_proj.",)),
    Kind(
        "MiMo's DFlash (attention sinks, a mask embedding of its own)",
        keys=("attention_sink_bias", "add_swa_attention_sink_bias", "attention_value_scale"),
        tensors=("attention_sink_bias", "mask_embedding"),
    ),
    Kind(
        "EAGLE-3 or P-EAGLE (autoregressive)",
        ("LlamaForCausalLMEagle3", "Eagle3Speculator", "PEagleSpeculator"),
        ("eagle3", "eagle", "peagle"),
        ("eagle_config", "norm_before_residual"),
        ("midlayer.",),
    ),
    Kind("multi-token prediction (MTP)", model_types=("mtp",), tensors=("mtp.",)),
)
KIND_KEYS = {key for kind in OTHER_KINDS for key in kind.keys}
"""Known by name; with a null, false or 0 value they are of no effect."""
REMEDY = "only plain DFlash is supported, so nothing of it was loaded"


def refuse_other_kinds(values: Values, dflash: Values) -> None:
    """Raises ValueError naming the kind if config.json describes a drafter of another one."""
    for kind in OTHER_KINDS:
        sign = _sign(kind, values, dflash)
        if sign is not None:
            raise ValueError(f"{sign} is a mark of {kind.name}; {REMEDY}")


def kind_of_tensors(names: Iterable[str]) -> tuple[str, str] | None:
    """The first tensor that only a drafter of another kind has, and that kind's name; None if there is none."""
    names = sorted(names)
    for kind in OTHER_KINDS:
        for name in names:
            if any(part in name for part in kind.tensors):
                return name, kind.name
    return None


def _sign(kind: Kind, values: Values, dflash: Values) -> str | None:
    architectures = values.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        if name in kind.architectures:
            return f"architectures=[{name!r}]"
    if values.get("speculators_model_type") in kind.model_types:
        return f"speculators_model_type={values['speculators_model_type']!r}"
    for where, place in (("", values), ("dflash_config.", dflash)):
        for key in kind.keys:
            if place.get(key) not in (None, 0, False, [], ""):
                return f"{where}{key}={shown(place[key])}"
    return None
