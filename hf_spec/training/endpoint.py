"""A client of servers with OpenAI's chat completions: vLLM, SGLang, ``hf-spec serve`` and others."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")

REFUSED = (400, 404, 413, 422)  # HTTP statuses that a repeated request would get again
NAMES = {"max_new_tokens": "max_tokens"}  # options of generate -> of chat completions
KNOWN = ("max_tokens", "temperature", "top_p", "seed", "stop", "frequency_penalty", "presence_penalty")
NOT_TEXT = ("tool_calls", "reasoning_content", "reasoning")  # fields for parts that parsers take out of an answer
QUEUED_PER_THREAD = 2  # requests per thread that may be queued, running or finished before the next result is read


class Refused(Exception):
    """A conversation that the server does not accept, with its reason."""


class Endpoint:
    """A ``model`` served at ``url``, in place of a target that is loaded here: ``regenerate(..., Endpoint(...))``.

    Requests are repeated when the server is busy or cannot be reached.

    Args:
        url: base URL of the API, such as ``http://localhost:8000/v1``.
        model: the target's name on the server.
        api_key: by default that of the environment variable ``OPENAI_API_KEY``, or none.
        retries: how often a request is repeated.
        timeout: seconds that an answer may take.
    """

    def __init__(
        self, url: str, model: str, *, api_key: str | None = None, retries: int = 8, timeout: float = 600.0
    ) -> None:
        try:
            from openai import OpenAI
        except ImportError as error:
            raise ImportError('an endpoint needs the openai library: pip install "hf-spec[train]"') from error
        self.url, self.model = url, model
        key = api_key or os.environ.get("OPENAI_API_KEY") or "none"  # a local server needs no key, but the client does
        self._client = OpenAI(base_url=url, max_retries=retries, timeout=timeout, api_key=key)

    def answer(
        self, messages: list[dict[str, Any]], arguments: dict[str, Any], options: dict[str, Any]
    ) -> tuple[str, bool]:
        """Return the model's answer to ``messages``, and whether it was cut off by the length limit.

        ``arguments`` are those of the chat template, ``options`` those of ``generate``. Options that OpenAI does not
        have are sent under their own names, as vLLM and SGLang accept them.

        Errors: ``Refused`` if the server refuses the conversation; a ConnectionError if it fails or cannot be reached.
        """
        from openai import APIConnectionError, APIStatusError

        try:
            said = self._client.chat.completions.create(
                model=self.model,
                messages=messages,  # type: ignore[arg-type]  # plain dicts, where openai has a type for each role
                **request_of(arguments, options),
            )
        except APIStatusError as error:
            if error.status_code in REFUSED:
                raise Refused(error.message) from error
            raise ConnectionError(f"{self.url} failed: {error.message}. Answers are kept: repeat the call") from error
        except APIConnectionError as error:
            raise ConnectionError(
                f"{self.url} cannot be reached ({error}). Start the server, or name another endpoint; answers are kept"
            ) from error
        choice = said.choices[0]
        if lost := next((name for name in NOT_TEXT if getattr(choice.message, name, None)), None):
            raise Refused(
                f"the server has taken {lost} out of the answer, which drafts have to learn with it: start it without "
                "a parser of tools and of reasoning"
            )
        text = (choice.message.content or "").strip()
        text = text.encode("utf-8", "replace").decode()  # a server may cut a surrogate pair in two
        return text, choice.finish_reason == "length"


def request_of(arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Turn arguments of a chat template and options of ``generate`` into those of a chat completion.

    Errors: a ValueError for a speculator, because the server has its own.
    """
    if "speculator" in options:
        raise ValueError("an endpoint has a speculator of its own: leave it out, and start the server with one")
    given = {NAMES.get(name, name): value for name, value in options.items()}
    if given.pop("do_sample", None) is False:
        given["temperature"] = 0.0
    arguments = dict(arguments)
    tools = {"tools": arguments.pop("tools")} if arguments.get("tools") else {}
    known = {name: given.pop(name) for name in KNOWN if name in given}
    extra = given | ({"chat_template_kwargs": arguments} if arguments else {})
    return known | tools | ({"extra_body": extra} if extra else {})


def map_in_threads(function: Callable[[A], B], given: Iterable[A], at_once: int) -> Iterator[B]:
    """Yield ``function`` of each of ``given``, in their order, computed by ``at_once`` threads.

    Nothing waits for running calls after an error or an interruption: a request may take minutes. So the threads are
    daemons, and not those of a ``ThreadPoolExecutor``, which Python joins.
    """
    rest, waiting = iter(given), deque[Future[B]]()
    tasks: SimpleQueue[tuple[Future[B], A] | None] = SimpleQueue()

    def work() -> None:
        while (task := tasks.get()) is not None:
            future, one = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(one))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(at_once):
        threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            for one in itertools.islice(rest, QUEUED_PER_THREAD * at_once - len(waiting)):
                waiting.append(Future())
                tasks.put((waiting[-1], one))
            if not waiting:
                return
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
        for _ in range(at_once):
            tasks.put(None)
