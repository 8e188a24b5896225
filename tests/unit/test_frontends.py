"""What frontends may do to an engine without harm."""

from minisgl.frontends import MESSAGES_PER_TURN, Frontends
from minisgl.protocol import Control, ControlAction, Message, Stats, Welcome
from minisgl.scheduler.scheduler import Scheduler, SchedulerConfig


class EndlessChannel:
    """Has always one more message, and takes none."""

    num_received = 0

    def receive(self) -> tuple[bytes, Message]:
        self.num_received += 1
        assert self.num_received <= 100 * MESSAGES_PER_TURN, "the engine reads for ever"
        return b"address", Control(ControlAction.PING)

    def send(self, client: bytes, message: Message) -> bool:
        return False


def test_receive_under_a_flood_ends_so_that_steps_go_on():
    channel = EndlessChannel()
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=8, page_size=4, max_running_req=2, max_extend_tokens=16, context_limit_tokens=32, vocab_size=8
        )
    )
    welcome = Welcome(1, "model", 8, 32, 4, 8, 16, 0)
    frontends = Frontends(channel, scheduler, welcome, lambda: Stats(*[0] * 11, 0.0))  # type: ignore[arg-type]
    frontends.receive(0.0)
    assert channel.num_received == MESSAGES_PER_TURN
