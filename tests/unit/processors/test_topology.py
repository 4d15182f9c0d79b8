"""The policy that gives the publisher's queue its dead-letter exchange, as content and as a command."""

from typing import Any

from processors import _topology
from processors._queues import Queues
from processors._topology import Finding, State

QUEUES = Queues("notification", "draft", "imports.v2")


def test_policy_is_for_this_queue_only() -> None:
    """A dot in the name is a dot."""
    name, content = _topology.policy(QUEUES)
    assert (name, content["pattern"], content["priority"]) == ("imports.v2-dead-letters", r"^imports\.v2$", 0)
    assert content["definition"] == {
        "dead-letter-exchange": "notification.dlx",
        "dead-letter-routing-key": "imports.v2.dlq",
    }


def test_policy_repeats_and_tops_what_is_in_force() -> None:
    """Only one policy counts: without its content a limit or a replication would end by our doing."""
    current = {"name": "everything", "priority": 7, "definition": {"max-length": 9}}
    _, content = _topology.policy(QUEUES, current)
    assert content["priority"] == 8
    assert content["definition"]["max-length"] == 9


def test_own_policy_stays_where_it_is_when_it_is_completed() -> None:
    """Applying again and again does not raise it again and again."""
    current: dict[str, Any] = {"name": "imports.v2-dead-letters", "priority": 8, "definition": {"max-length": 9}}
    assert _topology.policy(QUEUES, current)[1]["priority"] == 8


def test_command_can_be_typed_as_it_is() -> None:
    """Quoted for a shell."""
    line = _topology.command("my vhost", *_topology.policy(QUEUES))
    assert line == (
        "rabbitmqctl set_policy -p 'my vhost' --apply-to queues --priority 0 imports.v2-dead-letters '^imports\\.v2$' "
        '\'{"dead-letter-exchange": "notification.dlx", "dead-letter-routing-key": "imports.v2.dlq"}\''
    )


def test_what_cannot_be_known_is_no_drift() -> None:
    """Without the management interface `check` is no use as an alarm, if it always fires."""
    assert not _topology.drifted([Finding("a", State.OK), Finding("b", State.UNKNOWN)])
    assert _topology.drifted([Finding("a", State.DIFFERS)])
    assert _topology.drifted([Finding("a", State.MISSING)])
