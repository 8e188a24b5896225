"""Outputs reach whoever waits for them, in order; an error comes after them and stays."""

import asyncio
import gc
import threading
import weakref

import pytest

from minisgl.core import FinishReason
from minisgl.errors import EngineDead
from minisgl.mailbox import TURNS_PER_ROUND, AsyncMailbox, Output, ThreadMailbox, Turns

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
        mailbox = AsyncMailbox(Turns(asyncio.get_running_loop()))
        threading.Timer(0.05, lambda: (mailbox.put(ONE), mailbox.put(TWO), mailbox.fail(EngineDead("over")))).start()
        assert [await mailbox.take(1), await mailbox.take(1)] == [ONE, TWO]
        for _ in range(3):
            with pytest.raises(EngineDead, match="over"):
                await mailbox.take(1)

    asyncio.run(main())


def test_take_of_a_coroutine_lets_others_run_while_it_waits():
    async def main() -> None:
        mailbox = AsyncMailbox(Turns(asyncio.get_running_loop()))
        mailbox.put(ONE)
        await asyncio.sleep(0)
        assert await mailbox.take(1) == ONE
        waiting = asyncio.create_task(mailbox.take(1))
        turns = 0
        while not waiting.done() and turns < 100:
            await asyncio.sleep(0)
            turns += 1
        assert turns == 100 and not waiting.done()
        waiting.cancel()

    asyncio.run(main())


def test_put_after_the_loop_has_ended_is_harmless():
    async def main() -> AsyncMailbox:
        return AsyncMailbox(Turns(asyncio.get_running_loop()))

    mailbox = asyncio.run(main())
    mailbox.put(ONE)
    mailbox.fail(EngineDead("over"))


def test_take_gives_outputs_up_to_the_number_of_tokens_and_one_at_least():
    async def main() -> None:
        mailbox = AsyncMailbox(Turns(asyncio.get_running_loop()))
        outputs = [Output(1, [i] * 3) for i in range(5)]
        mailbox.put(outputs)
        assert await mailbox.take(1) == outputs[:1]
        assert await mailbox.take(6) == outputs[1:3]
        assert await mailbox.take(99) == outputs[3:]

    asyncio.run(main())


def test_readers_take_turns_and_others_run_between():
    """With far more readers than turns in a round, each with a backlog, a task of another kind waits one round only."""

    async def main() -> None:
        turns = Turns(asyncio.get_running_loop())
        num_taken = [0] * (5 * TURNS_PER_ROUND)
        most_in_one_round = 0

        async def read(i: int, mailbox: AsyncMailbox) -> None:
            while num_taken[i] < 10:
                num_taken[i] += len(await mailbox.take(1))

        mailboxes = [AsyncMailbox(turns) for _ in num_taken]
        readers = [asyncio.create_task(read(i, mailbox)) for i, mailbox in enumerate(mailboxes)]
        await asyncio.sleep(0)
        for mailbox in mailboxes:
            mailbox.put(ONE * 10)
        while not all(reader.done() for reader in readers):
            before = sum(num_taken)
            await asyncio.sleep(0)
            most_in_one_round = max(most_in_one_round, sum(num_taken) - before)
            assert max(num_taken) - min(num_taken) <= 1, "one reader was served before another"
        assert num_taken == [10] * len(num_taken)
        assert 0 < most_in_one_round <= TURNS_PER_ROUND

    asyncio.run(main())


def test_every_put_of_another_thread_is_taken():
    """However puts and turns interleave, no output waits for ever."""

    async def main() -> None:
        turns = Turns(asyncio.get_running_loop())
        mailboxes = [AsyncMailbox(turns) for _ in range(40)]

        async def read(mailbox: AsyncMailbox) -> list[int]:
            tokens: list[int] = []
            while len(tokens) < 500:
                tokens += [token for output in await mailbox.take(3) for token in output.token_ids]
            return tokens

        def write() -> None:
            for i in range(500):
                for mailbox in mailboxes:
                    mailbox.put([Output(1, [i])])

        writer = threading.Thread(target=write)
        writer.start()
        results = await asyncio.wait_for(asyncio.gather(*map(read, mailboxes)), 60)
        writer.join()
        assert all(tokens == list(range(500)) for tokens in results)

    asyncio.run(main())


def test_turns_do_not_keep_a_loop():
    loop = asyncio.new_event_loop()
    turns, kept = Turns(loop), weakref.ref(loop)
    loop.close()
    del loop
    gc.collect()
    assert kept() is None and turns is not None
