"""Is a server serving the recipe's target? Asked before the first row: a silent mismatch costs the whole corpus.

Four questions to each server, each answered with token ids where it gives them: is the model there and long enough; does the
completions endpoint echo the prompt ids that it was sent and return generated ids of this vocabulary; does its tokenizer make
the same ids of a text in many scripts and of the vocabulary's last tokens; does its chat template, in every thinking mode of
the run, make the same ids of a conversation. Weights cannot be seen from here: extract compares its first rows with them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import httpx

from configs.schema import Config
from data.client import ask
from data.servers import Server
from data.template import ChatTemplate
from data.wire import Answer, AnswerRules, TurnRequest, Unusable, completion_request, response_of
from target.generate import Sampling

logger = logging.getLogger(__name__)

_PROBE = (
    "Naïve café — 数学と物理, Привет! 1234567 + 0.5e-3 == x?\n\tdef f(x):\n\t    return x  # 🙂\r\n"
)
_NUM_LAST_TOKENS = 8
_CONVERSATION = [
    {"role": "user", "content": _PROBE},
    {"role": "assistant", "content": "Sure: 42."},
    {"role": "user", "content": "And twice that?"},
]


async def check_server(
    http: httpx.AsyncClient,
    server: Server,
    config: Config,
    template: ChatTemplate,
    rules: AnswerRules,
    thinking_modes: Sequence[bool | None],
) -> None:
    """Fill in `server.model`. Raises ValueError naming server and difference if it does not serve the recipe's target.

    What a server does not let be checked is logged, once, with what was checked instead.
    """
    server.model, longest = await _model_of(http, server, config)
    if longest is not None and longest < config.data.max_tokens:
        raise _mismatch(
            server,
            f"it holds sequences of {longest} tokens, data.max_tokens is {config.data.max_tokens}; start it with a larger "
            "--max-model-len or lower data.max_tokens",
        )
    await _check_completions(http, server, template, rules)
    await _check_tokenizer(http, server, template)
    for thinking in thinking_modes:
        await _check_template(http, server, config, template, thinking)
    logger.info("%s serves %s: tokenizer and chat template agree", server.url, server.model)


async def _model_of(
    http: httpx.AsyncClient, server: Server, config: Config
) -> tuple[str, int | None]:
    """The served name, and the longest sequence if the server says it."""
    assert config.data.responses.server is not None
    listed = await ask(http, f"{server.url}/models", None)
    try:
        models = {str(entry["id"]): entry.get("max_model_len") for entry in listed["data"]}
    except (KeyError, TypeError, AttributeError) as error:
        raise _mismatch(server, f"/models gives no list of models ({error!r})") from error
    wanted = config.data.responses.server.model
    if wanted is None and len(models) == 1:
        wanted = next(iter(models))
    if wanted is None or wanted not in models:
        raise _mismatch(
            server,
            f"data.responses.server.model={wanted}, it serves {', '.join(models) or 'nothing'}; set one of them",
        )
    longest = models[wanted]
    return wanted, longest if isinstance(longest, int) else None


async def _check_completions(
    http: httpx.AsyncClient, server: Server, template: ChatTemplate, rules: AnswerRules
) -> None:
    request = TurnRequest(template.prompt_ids(_CONVERSATION, server.url), 2, seed=0)
    body = completion_request(server.model, request, Sampling(), stream=False)
    answer = await _answer(http, server, "completions", body)
    if answer.ids is None:
        remedy = "use vLLM >= 0.10.2 or a SGLang with return_token_ids"
        if rules.tokenise is None:
            raise _mismatch(
                server,
                f"it returns no token ids; {remedy}, or accept re-tokenised text with data.responses.server.retokenise=true",
            )
        logger.warning(
            "%s returns no token ids: its text is tokenised again; %s", server.url, remedy
        )
    try:
        response_of(answer, request, rules)
    except Unusable as error:
        raise _mismatch(server, f"its answer to a known prompt: {error}") from error
    if answer.prompt_ids is None:
        _require_count(server, "prompt", answer, len(request.prompt_ids))


async def _check_tokenizer(http: httpx.AsyncClient, server: Server, template: ChatTemplate) -> None:
    text = _PROBE + template.last_tokens(_NUM_LAST_TOKENS)
    ours = template.encode(text)
    body = {
        "model": server.model,
        "prompt": text,
        "max_tokens": 1,
        "return_token_ids": True,
        "add_special_tokens": False,
    }
    answer = await _answer(http, server, "completions", body)
    if answer.prompt_ids == [*template.bos_ids, *ours]:
        return  # a server that knows no add_special_tokens
    _compare(server, "tokenizer", answer, ours)


async def _check_template(
    http: httpx.AsyncClient,
    server: Server,
    config: Config,
    template: ChatTemplate,
    thinking: bool | None,
) -> None:
    arguments: dict[str, Any] = dict(config.target.chat_template_kwargs)
    if thinking is not None:
        arguments["enable_thinking"] = thinking
    body = {
        "model": server.model,
        "messages": _CONVERSATION,
        "max_tokens": 1,
        "return_token_ids": True,
        "chat_template_kwargs": arguments,
    }
    ours = template.prompt_ids(_CONVERSATION, server.url, thinking=thinking)
    answer = await _answer(http, server, "chat/completions", body)
    _compare(server, f"chat template ({arguments or 'its defaults'})", answer, ours)


def _compare(server: Server, what: str, answer: Answer, ours: list[int]) -> None:
    if answer.prompt_ids is None:
        _require_count(server, what, answer, len(ours))
        return
    theirs = answer.prompt_ids
    if theirs == ours:
        return
    pairs = enumerate(zip(theirs, ours, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(theirs), len(ours)))
    raise _mismatch(
        server,
        f"its {what} is not that of target.model: from token {at} on it has {theirs[at : at + 4]}, here {ours[at : at + 4]}; "
        "serve the recipe's model and revision, or correct target.model",
    )


def _require_count(server: Server, what: str, answer: Answer, num_ours: int) -> None:
    """All that a server without prompt_token_ids lets be seen."""
    if answer.num_prompt_tokens != num_ours:
        raise _mismatch(
            server,
            f"its {what} gives {answer.num_prompt_tokens} tokens where target.model has {num_ours}; serve the recipe's model "
            "and revision, or correct target.model",
        )
    logger.warning("%s: only the number of tokens of its %s could be checked", server.url, what)


async def _answer(
    http: httpx.AsyncClient, server: Server, endpoint: str, body: dict[str, Any]
) -> Answer:
    answer = Answer()
    try:
        found = await ask(http, f"{server.url}/{endpoint}", body)
        if found is None:
            raise _mismatch(server, f"there is no /{endpoint}; base URLs end in /v1")
        answer.add(found)
    except Unusable as error:
        raise _mismatch(server, f"/{endpoint}: {error}") from error
    return answer


def _mismatch(server: Server, what: str) -> ValueError:
    return ValueError(f"data.responses.server {server.url}: {what}")
