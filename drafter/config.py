"""What a drafter is: the numbers that fix its tensors, its masks and how it is served."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Config

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's shape. Raises ValueError naming the field when two of them contradict each other."""

    hidden_size: int
    """H, the target's: fc maps D*H to H."""
    num_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    """The target's; neither embedding nor head is in a drafter, servers size their buffers by it."""
    block_size: int
    """K: the anchor and K-1 drafted tokens."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Taps: 0-based target layers whose output is read (HF `hidden_states[i+1]`)."""
    layer_types: tuple[str, ...]
    """`full_attention` or `sliding_attention`, one a layer."""
    sliding_window: int | None
    """W of the sliding layers in tokens; None without sliding layers."""
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    num_target_layers: int | None
    """None if the folder does not say (speculators' format does not)."""

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_layers(self)
        _check_target(self)

    def window(self, layer: int) -> int | None:
        """W of a sliding layer, None for a full one."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def drafter_config(config: Config) -> DrafterConfig:
    """The drafter that a recipe describes: its own section and the target's sizes."""
    section = config.drafter
    return DrafterConfig(
        hidden_size=config.target.hidden_size,
        num_layers=section.num_layers,
        intermediate_size=section.intermediate_size,
        num_attention_heads=section.num_attention_heads,
        num_key_value_heads=section.num_key_value_heads,
        head_dim=section.head_dim,
        vocab_size=config.target.vocab_size,
        block_size=section.block_size,
        mask_token_id=section.mask_token_id,
        target_layer_ids=section.target_layer_ids,
        layer_types=section.resolved_layer_types,
        sliding_window=section.sliding_window,
        rope_theta=section.rope_theta,
        rms_norm_eps=section.rms_norm_eps,
        max_position_embeddings=section.max_position_embeddings,
        num_target_layers=config.target.num_layers,
    )


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps spread evenly from layer 1 to the third last, rounded half to even, as released drafters have them."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))


def _check_sizes(config: DrafterConfig) -> None:
    for name in (
        "hidden_size",
        "num_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rope_theta",
        "rms_norm_eps",
        "max_position_embeddings",
    ):
        if not vars(config)[name] > 0:
            raise ValueError(f"{name}={vars(config)[name]} must be positive")
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} must be even: RoPE rotates pairs")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads={config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )
    if config.block_size < 2:
        raise ValueError(f"block_size={config.block_size} must be at least 2: anchor and a draft")


def _check_layers(config: DrafterConfig) -> None:
    if len(config.layer_types) != config.num_layers:
        raise ValueError(
            f"layer_types has {len(config.layer_types)} entries for {config.num_layers} layers"
        )
    unknown = sorted(set(config.layer_types) - {FULL, SLIDING})
    if unknown:
        raise ValueError(f"layer_types has {unknown[0]!r}; a drafter knows {FULL} and {SLIDING}")
    if SLIDING in config.layer_types and (config.sliding_window or 0) < 1:
        raise ValueError(
            f"sliding_window={config.sliding_window} must be positive for layers of {SLIDING}"
        )
    if SLIDING not in config.layer_types and config.sliding_window is not None:
        raise ValueError(f"sliding_window={config.sliding_window} is set but no layer is {SLIDING}")


def _check_target(config: DrafterConfig) -> None:
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise ValueError(
            f"mask_token_id={config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
        )
    taps = config.target_layer_ids
    if not taps or list(taps) != sorted(set(taps)) or taps[0] < 0:
        raise ValueError(
            f"target_layer_ids={list(taps)} must be increasing, from 0 on: readers disagree on the order of others"
        )
    depth = config.num_target_layers
    if depth is not None and taps[-1] >= depth - 1:
        raise ValueError(
            f"target_layer_ids={list(taps)}: the target has layers 0..{depth - 1}, and the last one is never tapped "
            "(transformers returns it after the final norm, servers before it)"
        )
