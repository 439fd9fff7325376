"""Preparation of requests in a thread, before generation: chats are rendered there, and stop strings compiled.

transformers' handlers do all of it in the event loop, where one long prompt would stop every text and every answer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from transformers.cli.serving.utils import InferenceThread

Result = TypeVar("Result")

# Functions that are called if the client leaves.
LEAVING: contextvars.ContextVar[list[Callable[[], None]]] = contextvars.ContextVar("LEAVING")
_CURRENT: contextvars.ContextVar[_Preparation] = contextvars.ContextVar("_CURRENT")


class Preparer:
    """One thread that prepares one request after the other, because tokenizers are not thread-safe."""

    def __init__(self) -> None:
        self.thread = InferenceThread()

    def around(self, handle: Callable[..., Coroutine[Any, Any, Result]]) -> Callable[..., Coroutine[Any, Any, Result]]:
        """Wrap ``handle`` so that it runs in the thread up to its first ``await`` that suspends it."""

        @functools.wraps(handle)
        async def handled(*args: Any) -> Result:
            answer: Result = await _Preparation(self).of(handle(*args))
            return answer

        return handled

    async def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call ``function`` in the thread, when its turn comes."""
        result: Result = await shielded(self.thread.async_submit(function, *args))
        return result


class _Preparation:
    """The preparation of one request; ``gone``: the client has left."""

    def __init__(self, preparer: Preparer) -> None:
        self.preparer, self.loop, self.gone = preparer, asyncio.get_running_loop(), False

    async def of(self, handling: Coroutine[Any, Any, Any]) -> Any:
        """Run ``handling`` and return its result."""
        context = contextvars.copy_context()
        step = self.preparer.thread.async_submit(context.run, self._first_step, handling)
        try:
            done, value = await shielded(step)
        except asyncio.CancelledError:
            self.gone = True
            step.add_done_callback(lambda _: _end(handling))  # no earlier: the thread runs it
            raise
        return value if done else await _go_on(handling, value)

    def _first_step(self, handling: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        """Return whether ``handling`` is done, and its result, or what it waits for."""
        _CURRENT.set(self)
        try:
            return (True, None) if self.gone else (False, handling.send(None))
        except StopIteration as end:
            return True, end.value

    def call(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` in the event loop, and wait for its result in the thread."""
        outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                if self.gone:
                    raise ConnectionAbortedError("the client has gone")
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return outcome.result()


def in_loop(function: Callable[[], Result]) -> Result:
    """Call ``function`` in the server's event loop, from there or from the preparing thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _CURRENT.get().call(function)
    return function()


def shielded(future: asyncio.Future[Result]) -> asyncio.Future[Result]:
    """Shield ``future`` from being cancelled, because a thread sets its result; the returned one may be cancelled."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio warns of an unread error
    return asyncio.shield(future)


def when_it_leaves(cancel: Callable[[], None]) -> None:
    """Call ``cancel`` if the client leaves, also between two steps of the answer."""
    LEAVING.get([]).append(cancel)


def _end(handling: Coroutine[Any, Any, Any]) -> None:
    """Cancel ``handling`` where it waits, so that it ends its text."""
    try:
        handling.throw(asyncio.CancelledError())
    except (asyncio.CancelledError, StopIteration, RuntimeError):
        pass
    finally:
        handling.close()


@types.coroutine
def _go_on(handling: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
    """Continue ``handling``, which waits for ``awaited``."""
    while True:
        try:
            step = functools.partial(handling.send, (yield awaited))
        except BaseException as error:
            step = functools.partial(handling.throw, error)
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
