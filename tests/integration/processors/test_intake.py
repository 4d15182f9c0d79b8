"""Intake on a real broker: every delivery is published, or laid to rest, or put back; never stuck, never lost."""

import json

from tests.support.amqp import Stage

LIST = [{"registration": 1, "agent_name": "Ana Exemplo"}, {"registration": 2, "agent_name": "João Exemplo"}]


async def test_list_is_in_the_stream_and_acked_when_it_was_published(stage: Stage) -> None:
    """As it came, byte for byte, with its batch id; and nobody asked a database."""
    body = json.dumps(LIST, ensure_ascii=False).encode()
    await stage.start()
    await stage.publish(body, content_type="application/json")
    await stage.settled(1)
    [record] = await stage.records()
    assert (record.body, record.type, record.headers["total"]) == (body, "import", 2)
    await stage.stop()
    assert await stage.ready() == 0
