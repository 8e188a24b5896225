"""Outputs reach whoever waits for them, in order; an error comes after them and stays."""

import asyncio
import threading

import pytest

from minisgl.core import FinishReason
from minisgl.errors import EngineDead
from minisgl.mailbox import AsyncMailbox, Output, ThreadMailbox

ONE, TWO = [Output(1, [5])], [Output(1, [6], FinishReason.LENGTH)]


def test_take_of_a_thread_gives_outputs_in_order_and_then_the_error():
    mailbox = ThreadMailbox()
    mailbox.put(ONE)
    mailbox.put(TWO)
    mailbox.fail(EngineDead("over"))
    assert [mailbox.take(), mailbox.take()] == [ONE, TWO]
    for _ in range(3):
        with pytest.raises(EngineDead, match="over"):
            mailbox.take()


def test_take_of_a_coroutine_gives_outputs_in_order_and_then_the_error():
    async def main() -> None:
        mailbox = AsyncMailbox()
        threading.Timer(0.05, lambda: (mailbox.put(ONE), mailbox.put(TWO), mailbox.fail(EngineDead("over")))).start()
        assert [await mailbox.take(), await mailbox.take()] == [ONE, TWO]
        for _ in range(3):
            with pytest.raises(EngineDead, match="over"):
                await mailbox.take()

    asyncio.run(main())


def test_take_of_a_coroutine_lets_others_run_while_it_waits():
    async def main() -> None:
        mailbox = AsyncMailbox()
        mailbox.put(ONE)
        await asyncio.sleep(0)
        assert await mailbox.take() == ONE
        waiting = asyncio.create_task(mailbox.take())
        turns = 0
        while not waiting.done() and turns < 100:
            await asyncio.sleep(0)
            turns += 1
        assert turns == 100 and not waiting.done()
        waiting.cancel()

    asyncio.run(main())


def test_put_after_the_loop_has_ended_is_harmless():
    async def main() -> AsyncMailbox:
        return AsyncMailbox()

    mailbox = asyncio.run(main())
    mailbox.put(ONE)
    mailbox.fail(EngineDead("over"))
