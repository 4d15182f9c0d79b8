"""Intake as a process that cannot reach the stream, killed right between putting a list back and acking it."""

import os
import signal
from collections.abc import Iterator
from unittest.mock import patch

from models.slices import Slice
from processors import intake
from processors.__main__ import app
from processors._amqp import Channel, Delivery
from processors._publish import Published
from streams.errors import LogError


async def _away(_intake: intake.Intake, _slices: Iterator[Slice]) -> Published:
    raise LogError("the stream is away")


def _kill(_channel: Channel, _delivery: Delivery) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


patch.object(intake.Intake, "_publish", _away).start()
patch.object(Channel, "ack", _kill).start()
app(["run", "intake"])
