"""An OpenAI-compatible server of our own for tests: models, completions, chat completions, streaming, and every way to fail.

It speaks HTTP/1.1 over asyncio in a thread. What it answers is a function of the request; how it fails is another.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from target.generate import Sampling, generate_batch
from target.load import Target

Body = dict[str, Any]
AnswerOf = Callable[[Body], list[int]]
FaultOf = Callable[[Body, int], str | None]
"""(request, how often this prompt was asked before) -> the name of a fault, or None."""

RUBBISH = {
    "bad_json": b'{"choices": [{"text": ',
    "bad_utf8": b'{"choices": [{"text": "\xe2\x82"}]}',
    "not_object": b"[1, 2]",
    "no_choices": b'{"choices": []}',
    "error_200": b'{"error": {"message": "engine died"}}',
    "html": b"<html>502 Bad Gateway</html>",
    "digits": b'{"choices": [{"text": ' + b"9" * 5000 + b"}]}",
    "text_number": b'{"choices": [{"text": 5, "token_ids": [5], "finish_reason": "length"}]}',
    "usage_list": b'{"choices": [], "usage": [1]}',
    "two_choices": b'{"choices": [{"text": "a", "index": 0}, {"text": "b", "index": 1}]}',
}


@dataclass
class LabelServer:
    """`with LabelServer(tokenizer, answer) as server: server.url`."""

    tokenizer: PreTrainedTokenizerBase
    answer: AnswerOf
    eos: int
    fault: FaultOf = lambda body, seen: None
    model: str = "tiny"
    max_model_len: int | None = 4096
    gives_ids: bool = True
    delay_s: float = 0.0
    requests: list[Body] = field(default_factory=list)
    """Bodies of completions of more than two tokens: not those of the handshake."""
    num_open: int = 0
    """Requests being answered, this one included only from when its fault was chosen."""
    most_open: int = 0
    statuses: Counter[str] = field(default_factory=Counter)

    def __enter__(self) -> LabelServer:
        self._seen: Counter[str] = Counter()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        self._ready.set()
        await self._stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await _read_head(reader)) is not None:
                path, length = head
                content = await reader.readexactly(length)
                body = json.loads(content) if content else {}
                if not await self._respond(path, body, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _respond(self, path: str, body: Body, writer: asyncio.StreamWriter) -> bool:
        """False if the connection is to be cut."""
        if path == "/v1/models":
            entry = {"id": self.model, "max_model_len": self.max_model_len}
            return await self._send(writer, 200, {"data": [entry]})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return await self._send(writer, 404, {"error": {"message": "no such path"}})
        fault = None
        if body["max_tokens"] > 2:
            key = json.dumps(body["prompt"])
            self.requests.append(body)
            fault = self.fault(body, self._seen[key])
            self._seen[key] += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(self.delay_s)
            self.statuses[fault or "ok"] += 1
            return await self._answer(fault, path, body, writer)
        finally:
            self.num_open -= 1

    async def _answer(
        self, fault: str | None, path: str, body: Body, writer: asyncio.StreamWriter
    ) -> bool:
        if fault == "cut":
            return False
        if fault == "stall":
            await asyncio.sleep(3600)
        if fault is not None and fault.isdigit():
            headers = {"Retry-After": "0.05"} if fault in ("429", "503") else {}
            return await self._send(writer, int(fault), {"error": {"message": "no"}}, headers)
        if fault in RUBBISH and not body.get("stream"):
            return await self._send(writer, 200, RUBBISH[fault])
        choice, usage = self._choice(fault, path, body)
        if body.get("stream"):
            return await self._stream(fault, choice, usage, writer)
        reply = {"choices": [choice], "usage": usage}
        if "message" in choice and "prompt_token_ids" in choice:  # as vLLM does
            reply["prompt_token_ids"] = choice.pop("prompt_token_ids")
        return await self._send(writer, 200, reply, cut=fault == "cut_body")

    def _choice(self, fault: str | None, path: str, body: Body) -> tuple[Body, Body]:
        prompt = self._prompt_ids(path, body)
        ids = self.answer({**body, "prompt": prompt})[: body["max_tokens"]]
        reason = "stop" if ids[-1] == self.eos else "length"
        if fault == "out_of_vocab":
            ids = [*ids[:-1], 10**6]
        if fault == "after_eos":
            ids = [self.eos, *ids[1:]]
        if fault == "no_eos":
            ids, reason = ids[:-1], "stop"
        if fault == "cut_short":  # a proxy that lowers max_tokens
            ids, reason = ids[:2], "length"
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        if fault == "lost_token":
            ids = ids[1:]
        choice: Body = {"index": 0, "finish_reason": reason}
        if fault == "abort":
            choice["finish_reason"] = "abort"
        text = self.tokenizer.decode([i for i in ids if i != self.eos and i < 10**6])
        choice |= {"message": {"content": text}} if "messages" in body else {"text": text}
        if self.gives_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
            if fault == "other_prompt":
                choice["prompt_token_ids"] = [*prompt[:-1], prompt[-1] + 1]
        return choice, usage

    def _prompt_ids(self, path: str, body: Body) -> list[int]:
        if path == "/v1/chat/completions":
            text = self.tokenizer.apply_chat_template(
                body["messages"],
                tokenize=False,
                add_generation_prompt=True,
                **body.get("chat_template_kwargs", {}),
            )
            assert isinstance(text, str)
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if isinstance(body["prompt"], str):
            return self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        return body["prompt"]

    async def _stream(
        self, fault: str | None, choice: Body, usage: Body, writer: asyncio.StreamWriter
    ) -> bool:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        events = [json.dumps(event).encode() for event in _pieces(choice, usage)]
        if fault in RUBBISH:
            events[1:1] = [RUBBISH[fault]]
        whole = b"".join(b"data: " + event + b"\r\n\r\n" for event in events) + b"data: [DONE]\n\n"
        if fault == "cut_body":
            whole = whole[: len(whole) // 2]
        for start in range(
            0, len(whole), 50
        ):  # pieces that end in the middle of lines and characters
            writer.write(whole[start : start + 50])
            await writer.drain()
            if fault == "stall_stream" and start > 100:
                await asyncio.sleep(3600)
        return False

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        reply: Body | bytes,
        headers: dict[str, str] | None = None,
        cut: bool = False,
    ) -> bool:
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(content)}"]
        lines += [f"{key}: {value}" for key, value in (headers or {}).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        writer.write(content[: len(content) // 2] if cut else content)
        await writer.drain()
        return not cut


def _pieces(choice: Body, usage: Body) -> list[Body]:
    """A stream as servers send it: ids and text by and by, the prompt's ids first, the reason last, then the usage."""
    ids = choice.get("token_ids", [])
    cuts = [(i, i + 3) for i in range(0, max(len(ids), 1), 3)]
    pieces: list[Body] = [{"index": 0, "text": "", "finish_reason": None} for _ in cuts]
    if "token_ids" in choice:
        pieces[0]["prompt_token_ids"] = choice["prompt_token_ids"]
        for piece, (start, end) in zip(pieces, cuts, strict=True):
            piece["token_ids"] = ids[start:end]
    pieces[0]["text"] = choice["text"]
    pieces[-1]["finish_reason"] = choice["finish_reason"]
    return [*({"choices": [piece]} for piece in pieces), {"choices": [], "usage": usage}]


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, int] | None:
    first = await reader.readline()
    if not first:
        return None
    path, length = first.split()[1].decode(), 0
    while (line := await reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return path, length


_LETTER_A = 64  # id of "a" in the tiny targets' byte tokenizer


def ascii_answers(eos: int) -> AnswerOf:
    """A made-up answer of 3 to 22 letters and an EOS, of the prompt's ids and the seed alone."""

    def answer(body: Body) -> list[int]:
        digest = hashlib.sha256(json.dumps([body["prompt"], body.get("seed")]).encode()).digest()
        return [*(_LETTER_A + value % 26 for value in digest[: 3 + digest[0] % 20]), eos]

    return answer


def target_answers(target: Target) -> AnswerOf:
    """The target's own greedy answer."""

    def answer(body: Body) -> list[int]:
        assert body.get("temperature", 0) == 0
        return generate_batch(target, [body["prompt"]], body["max_tokens"], Sampling())[0]

    return answer


def fails_first(*faults: str) -> FaultOf:
    """The n-th prompt's first try fails with the n-th fault, in turns; the second try is well."""
    order: dict[str, str] = {}

    def fault(body: Body, seen: int) -> str | None:
        key = json.dumps(body["prompt"])
        order.setdefault(key, faults[len(order) % len(faults)])
        return order[key] if seen == 0 else None

    return fault


def fails_always(names: Sequence[str], is_bad: Callable[[Body], bool]) -> FaultOf:
    """Prompts for which `is_bad` holds fail at every try."""
    return lambda body, seen: names[seen % len(names)] if is_bad(body) else None
