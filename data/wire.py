"""The completions endpoint of an OpenAI-compatible server: the request for one turn, and its answer checked and read.

The prompt goes as token ids, so the server adds and re-tokenises nothing. Every sampling setting is stated, because a server
fills what is left out from the model's generation_config.json (top_k 20, repetition penalties). `return_token_ids`
(vLLM from 0.10.2, SGLang from July 2026) brings the generated ids, EOS included, and the prompt's for comparison.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass
from typing import Any

from data.turns import Response
from target.generate import Sampling


class Unusable(Exception):
    """An answer that arrived and cannot be kept; the message is the reason, without the row."""


@dataclass(frozen=True)
class TurnRequest:
    prompt_ids: list[int]
    max_new_tokens: int
    seed: int


@dataclass(frozen=True)
class AnswerRules:
    """What an answer must satisfy."""

    vocab_size: int
    eos_token_ids: Collection[int]
    tokenise: Callable[[str], list[int]] | None = None
    """Given: text is tokenised again where a server sends no ids. None: that is refused."""
    turn_end_id: int | None = None
    """The EOS token that a text which stopped is taken to have ended with; only with `tokenise`."""


@dataclass
class Answer:
    """A completion's one choice, whole or collected from the pieces of a stream."""

    text: str = ""
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_token: int | None = None
    """The EOS token that ended it, where the server names it apart."""
    num_tokens: int | None = None
    """The server's own count of generated tokens."""
    num_prompt_tokens: int | None = None

    def add(self, body: Any) -> None:
        """Take a response body or a stream's piece. Raises Unusable if it is of another shape."""
        if not isinstance(body, dict) or "error" in body:
            raise Unusable(f"server error in the answer: {_shown(body)}")
        if body.get("prompt_token_ids") is not None:  # vLLM's chat endpoint
            self.prompt_ids = _require_ids(body["prompt_token_ids"])
        choices = body.get("choices", [])
        if not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices):
            raise Unusable(f"answer without choices: {_shown(body)}")
        if len(choices) > 1:
            raise Unusable(f"{len(choices)} choices where one was asked for")
        usage = body.get("usage") or {}
        if not isinstance(usage, dict):
            raise Unusable(f"usage is no object: {_shown(usage)}")
        self.num_tokens = usage.get("completion_tokens", self.num_tokens)
        self.num_prompt_tokens = usage.get("prompt_tokens", self.num_prompt_tokens)
        for choice in choices:
            self._add_choice(choice)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        text = choice.get("text") or ""
        if not isinstance(text, str) or choice.get("index", 0) != 0:
            raise Unusable(f"not the first choice, or not with text: {_shown(choice)}")
        self.text += text
        ids = choice.get("token_ids")
        if ids is not None:
            self.ids = (self.ids or []) + _require_ids(ids)
        if choice.get("prompt_token_ids") is not None:
            self.prompt_ids = _require_ids(choice["prompt_token_ids"])
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        for name in ("stop_reason", "matched_stop"):  # vLLM, SGLang
            if isinstance(choice.get(name), int):
                self.stop_token = choice[name]


def completion_request(
    model: str, request: TurnRequest, sampling: Sampling, stream: bool
) -> dict[str, Any]:
    """The JSON body of POST /completions."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": request.seed,
        "n": 1,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body


def parse_body(content: bytes) -> Any:
    """The JSON of a response. Raises Unusable for bytes that are no UTF-8 or no JSON."""
    try:
        return json.loads(content.decode())
    # a ValueError: a number of thousands of digits too
    except (ValueError, RecursionError) as error:
        raise Unusable(f"not valid JSON ({type(error).__name__})") from error


async def read_stream(chunks: AsyncIterator[bytes]) -> Answer:
    """Collect server-sent events until `data: [DONE]`. Raises Unusable for rubbish, or a stream that ends before that."""
    answer, rest = Answer(), b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            field_name, _, value = line.rstrip(b"\r").partition(b":")
            if field_name != b"data":
                continue
            value = value.strip()
            if value == b"[DONE]":
                return answer
            answer.add(parse_body(value))
    raise Unusable("the stream ended before [DONE]")


def response_of(answer: Answer, request: TurnRequest, rules: AnswerRules) -> Response:
    """The generated ids, EOS included, as they are. Raises Unusable with the reason if anything does not fit."""
    if answer.finish_reason not in ("stop", "length"):
        raise Unusable(f"finish_reason is {answer.finish_reason!r}, not stop or length")
    if answer.prompt_ids is not None and answer.prompt_ids != request.prompt_ids:
        raise Unusable(
            "the server answered another prompt: its prompt_token_ids are not those sent"
        )
    ids = _ids_of(answer, rules)
    if not ids or not all(0 <= i < rules.vocab_size for i in ids):
        raise Unusable(f"token ids are none or outside 0..{rules.vocab_size - 1}")
    if len(ids) > request.max_new_tokens:
        raise Unusable(f"{len(ids)} tokens for max_tokens={request.max_new_tokens}")
    if any(i in rules.eos_token_ids for i in ids[:-1]):
        raise Unusable("tokens after an EOS token")
    finished = ids[-1] in rules.eos_token_ids
    if answer.finish_reason == "stop" and not finished:
        raise Unusable("it stopped without an EOS token of the target")
    if not finished and len(ids) < request.max_new_tokens:
        raise Unusable(
            f"cut after {len(ids)} of max_tokens={request.max_new_tokens} tokens: the server or a proxy has a lower limit"
        )
    return Response(ids, finished)


def _ids_of(answer: Answer, rules: AnswerRules) -> list[int]:
    ids = answer.ids
    if ids is None:
        if rules.tokenise is None:
            raise Unusable("no token_ids in the answer")
        ids = rules.tokenise(answer.text)
        if answer.finish_reason == "stop" and rules.turn_end_id is not None:
            ids = ids if ids[-1:] == [rules.turn_end_id] else [*ids, rules.turn_end_id]
    # some servers leave out the EOS token that ended the turn and name it apart
    if answer.finish_reason == "stop" and answer.stop_token in rules.eos_token_ids:
        assert answer.stop_token is not None
        ids = ids if ids[-1:] == [answer.stop_token] else [*ids, answer.stop_token]
    if answer.num_tokens is not None and answer.num_tokens != len(ids):
        raise Unusable(f"{len(ids)} token ids, but the server counts {answer.num_tokens}")
    return ids


def _require_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise Unusable(f"token ids are no list of integers: {_shown(ids)}")
    return ids


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)[:200]
