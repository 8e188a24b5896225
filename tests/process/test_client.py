"""What a connection does that no user of `LLM` can provoke at will."""

import asyncio
import gc
import threading
import weakref
from array import array
from collections import deque
from concurrent.futures import Future

import pytest
from fake_engine import running_engine

from minisgl.client import EngineClient
from minisgl.connection import Command, Connection
from minisgl.core import FinishReason
from minisgl.errors import EngineDead, MinisglError
from minisgl.mailbox import AsyncMailbox, Output, ThreadMailbox
from minisgl.protocol import Control, NewRequest, Outputs, Sampling, Stats
from minisgl.transport import Waker

SAMPLING = Sampling(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, b"", b"", b"", None)


def make_request(request_id: int, num_samples: int = 1, max_tokens: int = 3) -> NewRequest:
    return NewRequest(request_id, array("i", [1]).tobytes(), bytes(8 * num_samples), max_tokens, SAMPLING, False)


def test_command_that_comes_at_the_very_end_is_told_of_it(tmp_path):
    """A caller that handed over its request just before the connection failed must not wait for ever."""
    commands: deque[Command] = deque()
    waker = Waker()
    connection = Connection(f"ipc://{tmp_path}/nobody.sock", None, commands, waker)
    mailbox, answer = ThreadMailbox(), Future[Stats]()
    commands.append(lambda connection: connection.accept([make_request(1)], mailbox))
    commands.append(lambda connection: connection.ask_stats(answer))
    connection.fail(EngineDead("it is over"))
    with pytest.raises(EngineDead, match="it is over"):
        mailbox.take()
    with pytest.raises(EngineDead, match="it is over"):
        mailbox.take()
    with pytest.raises(EngineDead, match="it is over"):
        answer.result(1)
    waker.close()


def test_raised_errors_are_copies(tmp_path):
    """Threads that raise one and the same exception would add to each other's tracebacks."""
    with running_engine(f"ipc://{tmp_path}/engine.sock") as engine:
        client = EngineClient(engine.address)
        client.close()
        errors = []
        for _ in range(2):
            with pytest.raises(EngineDead) as caught:
                client.check_alive()
            errors.append(caught.value)
        assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1])


def test_ids_of_all_threads_are_apart(tmp_path):
    with running_engine(f"ipc://{tmp_path}/engine.sock") as engine:
        client = EngineClient(engine.address)
        ids: list[int] = []

        def reserve() -> None:
            for _ in range(300):
                first = client.make_request_ids(3)
                ids.extend((first, first + 1, first + 2))

        threads = [threading.Thread(target=reserve) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
    assert len(set(ids)) == 4 * 300 * 3


def test_request_larger_than_the_window_goes_out_alone(tmp_path):
    with running_engine(f"ipc://{tmp_path}/engine.sock", window=2) as engine:
        client = EngineClient(engine.address)
        mailbox = ThreadMailbox()
        client.submit([make_request(1)], mailbox)
        client.submit([make_request(2, num_samples=5)], mailbox)
        finished = {}
        while len(finished) < 6:
            finished |= {output.request_id: output.finish_reason for output in mailbox.take()}
        assert set(finished.values()) == {FinishReason.LENGTH}
        client.close()


class Recorder:
    """A mailbox that nobody waits at."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.errors: list[MinisglError] = []

    def put(self, outputs: list[Output]) -> None:
        self.outputs += outputs

    def fail(self, error: MinisglError) -> None:
        self.errors.append(error)


def test_discarded_sample_is_heard_of_no_more_but_frees_the_window(tmp_path):
    with running_engine(f"ipc://{tmp_path}/engine.sock", window=1) as engine:
        engine.is_paused = True
        client = EngineClient(engine.address)
        dropped, wanted = Recorder(), ThreadMailbox()
        client.submit([make_request(1)], dropped)
        client.submit([make_request(2)], wanted)
        engine.wait_for(lambda: bool(engine.requests()))
        client.abort([1], discard=True)
        engine.wait_for(lambda: engine.aborted() == {1})
        engine.is_paused = False
        assert [list(output.token_ids) for output in wanted.take()] == [[2, 3, 4]]
        client.close()
        assert (dropped.outputs, dropped.errors) == ([], [])


def many_tokens(request_id: int) -> Outputs:
    """What takes longer to read than to send."""
    return Outputs(
        0, array("Q", [request_id]).tobytes(), array("i", [50_000]).tobytes(), b"\0", bytes(4), bytes(200_000),
        (), b"", b"",
    )  # fmt: skip


def test_client_under_a_flood_of_messages_still_speaks(tmp_path):
    """An engine that is always faster than its frontend must hear its pings and aborts all the same."""
    with running_engine(f"ipc://{tmp_path}/engine.sock") as engine:
        client = EngineClient(engine.address)
        engine.is_paused = True
        client.submit([make_request(1), make_request(2)], ThreadMailbox())
        engine.wait_for(lambda: len(engine.running) == 2)
        engine.flood = many_tokens(2)
        num_pings = sum(isinstance(message, Control) for message in engine.received)
        client.abort([1])
        engine.wait_for(lambda: engine.aborted() == {1})
        engine.wait_for(lambda: sum(isinstance(message, Control) for message in engine.received) >= num_pings + 2)
        client.check_alive()
        engine.flood = None
        client.close()


def test_closed_loops_are_not_kept_though_readers_were_due(tmp_path):
    """A program that calls `asyncio.run` for each job must not collect its loops."""
    with running_engine(f"ipc://{tmp_path}/engine.sock") as engine:
        client = EngineClient(engine.address)

        async def leave_a_reader() -> AsyncMailbox:
            mailbox = AsyncMailbox(client.get_turns())
            reader = asyncio.create_task(mailbox.take(1))
            await asyncio.sleep(0)
            reader.cancel()
            mailbox.put([Output(1, [5])])
            return mailbox

        mailboxes = [asyncio.run(leave_a_reader()) for _ in range(5)]
        for mailbox in mailboxes:
            mailbox.put([Output(1, [6])])
        loops = [weakref.ref(mailbox.turn._loop) for mailbox in mailboxes]
        del mailboxes, mailbox

        async def come_later() -> None:
            client.get_turns()

        asyncio.run(come_later())
        gc.collect()
        assert [loop() for loop in loops] == [None] * 5
        client.close()
