"""Labels from OpenAI-compatible servers: hundreds of conversations at once, each turn recorded when it is answered.

A killed run continues with the turn after the last recorded one of each conversation. One process asks all servers; other
ranks wait. Nothing is held but the conversations in flight: prompts are read from the plan as slots get free.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from common.distributed import Ranks, barrier, raise_together
from common.files import only_writer
from common.progress import Progress
from configs.schema import Config, ServerSection
from data.answers import Answers
from data.client import Client, RowFailed, http_client
from data.dialogue import Dialogue
from data.handshake import check_server
from data.plan import Plan
from data.prompts import Prompt
from data.servers import NoServer, Server, Servers
from data.template import ChatTemplate
from data.wire import AnswerRules, TurnRequest
from target.generate import Sampling
from target.load import eos_token_ids

logger = logging.getLogger(__name__)

_QUIET_S = 30.0
_EARLY_FAILURES = 20
_SHOWN_FAILURES = 5


class ServedLabels:
    """The `Labels` of `data.responses.server`."""

    def __init__(self, config: Config, plan: Plan, template: ChatTemplate, rules: AnswerRules):
        self._config, self._plan, self._template, self._rules = config, plan, template, rules
        self._failed: dict[int, str] = {}

    def make(self, ranks: Ranks) -> None:
        """Ask until every prompt has its answers or a reason.

        Raises ValueError if a server does not serve the target, none is left, or too many prompts got no answer; what was
        answered stays, and a later run goes on.
        """
        with raise_together(ranks):
            if ranks.is_main:
                with only_writer(self._plan.folder / "answers.lock"):
                    answers = Answers(self._plan, self._template, self._config.data)
                    try:
                        asyncio.run(self._make(answers))
                    finally:
                        answers.close()
                    self._failed = answers.failed
        barrier()

    def dialogues(self, chunk: int) -> Iterator[Dialogue]:
        """On the main rank, which alone knows what failed."""
        answers = Answers(self._plan, self._template, self._config.data)
        answers.failed = self._failed
        first = chunk * self._plan.chunk_size
        for place, prompt in enumerate(self._plan.chunk(chunk), start=first):
            yield answers.dialogue(place, prompt)
        answers.close()

    async def _make(self, answers: Answers) -> None:
        config, section = self._config, self._config.data.responses.server
        assert section is not None
        servers = Servers(section.urls, section.concurrency, section.give_up_s)
        async with http_client(section, _api_key(section)) as http:
            modes = self._plan.thinking_modes()
            for server in servers.all:
                await check_server(http, server, config, self._template, self._rules, modes)
            settings = config.data.responses
            sampling = Sampling(settings.temperature, settings.top_p, settings.top_k)
            client = Client(section, servers, http, sampling, self._rules)
            run = _Run(client, answers, self._plan, config.run.seed, section.max_failed)
            await run.finish(section.concurrency * len(section.urls))
        logger.info("labels: %s", answers.account(self._plan.num_prompts))


class _Run:
    """The conversations in flight, and what is told about them."""

    def __init__(self, client: Client, answers: Answers, plan: Plan, seed: int, max_failed: float):
        self._client, self._answers, self._plan = client, answers, plan
        self._seed, self._max_failed = seed, max_failed
        self._first_tokens = answers.num_tokens
        self._started = self._last_answer = time.monotonic()
        self._num_tried = 0
        self._progress = Progress("labels", plan.num_prompts, "prompts", done=answers.num_ended)

    async def finish(self, num_workers: int) -> None:
        """Raises the first worker's error, with all others cancelled."""
        pending = (
            (place, prompt)
            for place, prompt in _places(self._plan)
            if not self._answers.has_ended(place)
        )
        left = self._plan.num_prompts - self._answers.num_ended
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                workers = [
                    group.create_task(self._work(pending)) for _ in range(min(num_workers, left))
                ]
                if workers:
                    await asyncio.wait(workers)
                watch.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._progress.finish(self._note())

    async def _work(self, pending: Iterator[tuple[int, Prompt]]) -> None:
        for place, prompt in pending:
            try:
                await self._converse(place, prompt)
            except RowFailed as error:
                self._fail(place, prompt, error)
            except NoServer as error:
                raise ValueError(
                    f"{error}; what was answered is kept: start the servers and run the data stage again"
                ) from error
            self._num_tried += 1
            self._progress.advance(1, self._note())

    async def _converse(self, place: int, prompt: Prompt) -> None:
        dialogue = self._answers.dialogue(place, prompt)
        server: Server | None = None
        while (turn := dialogue.next_turn()) is not None:
            seed = turn_seed(self._seed, prompt.sample_id, turn.index)
            request = TurnRequest(turn.prompt_ids, turn.max_new_tokens, seed)
            response, server = await self._client.answer(request, preferred=server)
            dialogue.accept(response)
            self._answers.record(place, turn.index, response, is_last=dialogue.ended is not None)
            self._last_answer = time.monotonic()

    def _fail(self, place: int, prompt: Prompt, error: RowFailed) -> None:
        failed = self._answers.failed
        failed[place] = error.reason
        if len(failed) <= _SHOWN_FAILURES:
            logger.warning("%s: %s: %s", prompt.where, error.reason, error.detail)
        # most of the first ones fail: the rest would too
        is_early = len(failed) >= _EARLY_FAILURES and 2 * len(failed) > self._num_tried
        most = max(_SHOWN_FAILURES, int(self._max_failed * self._plan.num_prompts))
        if is_early or len(failed) > most:
            raise ValueError(
                f"{len(failed)} of {self._num_tried + 1} prompts got no answer, the last one: {error.reason}: {error.detail}; "
                "what was answered is kept: correct the server and run the data stage again, or raise "
                "data.responses.server.max_failed"
            )

    async def _watch(self) -> None:
        """Say that it is alive while long answers are waited for, and what is in the way."""
        while True:
            await asyncio.sleep(_QUIET_S)
            quiet_s = time.monotonic() - self._last_answer
            if quiet_s >= _QUIET_S:
                told = [s.last_trouble for s in self._client.servers.all if s.num_troubles]
                trouble = f"; in trouble: {'; '.join(told)}" if told else ""
                logger.info("labels: no answer for %.0f s, %s%s", quiet_s, self._note(), trouble)

    def _note(self) -> str:
        elapsed = max(time.monotonic() - self._started, 1e-9)
        tokens_per_s = (self._answers.num_tokens - self._first_tokens) / elapsed
        retries = self._client.retries.total()
        return (
            f"{tokens_per_s:.0f} tokens/s, {self._client.servers.in_flight} in flight"
            + (f", {retries} retries" if retries else "")
            + (f", {len(self._answers.failed)} failed" if self._answers.failed else "")
        )


def answer_rules(config: Config, tokenizer: PreTrainedTokenizerBase) -> AnswerRules:
    """What the recipe's target can have generated. Loads no weights."""
    section = config.data.responses.server
    assert section is not None

    def tokenise(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return AnswerRules(
        vocab_size=config.target.vocab_size,
        eos_token_ids=frozenset(eos_token_ids(config.target, tokenizer)),
        tokenise=tokenise if section.retokenise else None,
        turn_end_id=turn_end if isinstance(turn_end := tokenizer.eos_token_id, int) else None,
    )


def turn_seed(seed: int, sample_id: str, turn: int) -> int:
    """The server's seed of a turn: of the row alone, whatever order, server or run. 31 bits, which every server takes."""
    digest = hashlib.sha256(f"turn:{seed}:{sample_id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _api_key(section: ServerSection) -> str | None:
    if section.api_key_variable is None:
        return None
    key = os.environ.get(section.api_key_variable)
    if not key:
        raise ValueError(
            f"data.responses.server.api_key_variable={section.api_key_variable} is not set in the environment; export it"
        )
    return key


def _places(plan: Plan) -> Iterator[tuple[int, Prompt]]:
    for chunk in range(plan.num_chunks):
        yield from enumerate(plan.chunk(chunk), start=chunk * plan.chunk_size)
