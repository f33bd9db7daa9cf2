"""The section `data`: sources, who answers them, and what is kept."""

from __future__ import annotations

import string
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveInt,
    model_validator,
)

from configs.section import Fraction, Section

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
