"""The part of a request before its text begins, in a thread: chats are rendered there, and stop strings compiled.

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

# What is called if the client goes.
LEAVING: contextvars.ContextVar[list[Callable[[], None]]] = contextvars.ContextVar("LEAVING")
_CURRENT: contextvars.ContextVar[_Preparation] = contextvars.ContextVar("_CURRENT")


class Preparer:
    """One thread that prepares one request after the other, because tokenizers are not made for several."""

    def __init__(self) -> None:
        self.thread = InferenceThread()

    def around(self, handle: Callable[..., Coroutine[Any, Any, Result]]) -> Callable[..., Coroutine[Any, Any, Result]]:
        """Return ``handle`` such that it runs in the thread up to where it waits for the first time."""

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
    """One request; its ``gone`` says that nobody waits for the answer any more."""

    def __init__(self, preparer: Preparer) -> None:
        self.preparer, self.loop, self.gone = preparer, asyncio.get_running_loop(), False

    async def of(self, handling: Coroutine[Any, Any, Any]) -> Any:
        """Return what ``handling`` does."""
        context = contextvars.copy_context()
        step = self.preparer.thread.async_submit(context.run, self._first_step, handling)
        try:
            done, value = await shielded(step)
        except asyncio.CancelledError:
            self.gone = True
            step.add_done_callback(lambda _: _end(handling))  # no earlier: the thread has it
            raise
        return value if done else await _go_on(handling, value)

    def _first_step(self, handling: Coroutine[Any, Any, Any]) -> tuple[bool, Any]:
        """Return whether all is done, and what came of it, or what it waits for."""
        _CURRENT.set(self)
        try:
            return (True, None) if self.gone else (False, handling.send(None))
        except StopIteration as end:
            return True, end.value

    def call(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` in the loop, and wait for it in the thread."""
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
    """Call ``function``, which belongs to the server's event loop, from there or from the thread that prepares."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _CURRENT.get().call(function)
    return function()


def shielded(future: asyncio.Future[Result]) -> asyncio.Future[Result]:
    """Return what may be cancelled, which ``future`` may not: a thread reports to it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody else may look
    return asyncio.shield(future)


def when_it_leaves(cancel: Callable[[], None]) -> None:
    """Call ``cancel`` if the client leaves, also between two steps of the answer."""
    LEAVING.get([]).append(cancel)


def _end(handling: Coroutine[Any, Any, Any]) -> None:
    """Cancel what waits, so that it ends its text."""
    try:
        handling.throw(asyncio.CancelledError())
    except (asyncio.CancelledError, StopIteration, RuntimeError):
        pass
    finally:
        handling.close()


@types.coroutine
def _go_on(handling: Coroutine[Any, Any, Any], awaited: Any) -> Generator[Any, Any, Any]:
    """Go on with ``handling``, which waits for ``awaited``."""
    while True:
        try:
            step = functools.partial(handling.send, (yield awaited))
        except BaseException as error:
            step = functools.partial(handling.throw, error)
        try:
            awaited = step()
        except StopIteration as end:
            return end.value
