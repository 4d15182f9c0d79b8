"""Lanes: who may be claimed next, and what becomes of rows whose provider is away."""

from streams.assignment import Entry
from streams.breaker import BreakerPolicy, State
from streams.errors import LeaseOver, Retry
from streams.lanes import Candidate, Lanes, Roads, Waiting

POLICY = BreakerPolicy(threshold=2, probe_seconds=5.0, probe_max_seconds=20.0)
REFUSED = Retry("connection refused", fault="connect")


def roads(width: int = 2) -> Roads:
    """Lanes by the row's target."""
    return Roads(Lanes(lambda row: str(row["target"]), width), 64, POLICY)


def waiting(all_lanes: Roads, *rows: tuple[int, str, int]) -> Waiting:
    """Candidates with these ids, lanes and attempts."""
    found = Waiting(all_lanes)
    found.extend(Candidate(Entry(n, 0), n, str(n), None, lane, attempts) for n, lane, attempts in rows)
    return found


def broken(all_lanes: Roads, name: str, now: float = 0.0) -> None:
    """Let a lane's breaker open."""
    for row_id in (901, 902):
        all_lanes[name].take(row_id)
        all_lanes[name].learn(row_id, REFUSED, now)
        all_lanes[name].give_back(row_id, now)
    assert all_lanes.any_open


def ids(queue: Waiting, all_lanes: Roads, now: float = 0.0) -> list[int]:
    """Take as long as there is room."""
    taken = []
    while (lane := queue.next_lane(now)) is not None:
        taken.append(queue.take(lane).row_id)
    return taken


def test_a_full_lane_holds_up_its_own_rows_only() -> None:
    """Others pass, in their order, and what was full goes on when one is done."""
    lanes = roads()
    queue = waiting(lanes, (1, "a", 0), (2, "a", 0), (3, "a", 0), (4, "b", 0), (5, "b", 0))
    assert sorted(ids(queue, lanes)) == [1, 2, 4, 5]
    assert len(queue) == 1
    lanes["a"].give_back(1, 0.0)
    assert ids(queue, lanes) == [3]


def test_without_lanes_all_rows_share_the_slots() -> None:
    """One lane, and its order."""
    lanes = Roads(None, 3, POLICY)
    assert lanes.of({"target": "a"}) == ""
    queue = waiting(lanes, *((n, "", 0) for n in range(5)))
    assert ids(queue, lanes) == [0, 1, 2]
    assert list(queue.deferred(0.0)) == []


def test_room_is_kept_in_every_lane_while_nobody_knows_the_lanes_of_rows() -> None:
    """Also in one that is first named meanwhile; given back, all is as before."""
    lanes = roads(width=3)
    lanes["a"].take(1)
    assert lanes.hold(2)
    assert (lanes["a"].busy, lanes["b"].busy) == (3, 2)
    assert ids(waiting(lanes, (2, "a", 0), (3, "b", 0), (4, "b", 0)), lanes) == [3]
    lanes.release(2)
    assert (lanes["a"].busy, lanes["b"].busy) == (1, 1)


def test_no_room_is_kept_where_a_lane_is_full_or_its_provider_away() -> None:
    """Nor for more rows than any lane is wide. Whose lane is known then takes its own turn."""
    lanes = roads(width=2)
    assert not lanes.hold(3)
    lanes["a"].take(1)
    assert not lanes.hold(2)
    assert lanes.hold(1)
    lanes.release(1)
    broken(lanes, "b")
    assert not lanes.hold(1)


def test_rows_are_deferred_until_the_probe_when_their_provider_is_away() -> None:
    """Those of the broken lane only."""
    lanes = roads()
    queue = waiting(lanes, (1, "a", 0), (2, "b", 0), (3, "a", 1))
    broken(lanes, "a")
    assert [(c.row_id, seconds) for c, seconds in queue.deferred(2.0)] == [(1, 3.0), (3, 3.0)]
    assert ids(queue, lanes) == [2]


def test_the_row_with_the_fewest_attempts_is_the_probe_and_the_others_wait_for_it() -> None:
    """One claim; when it succeeds, the lane is open to all."""
    lanes = roads()
    queue = waiting(lanes, (1, "a", 2), (2, "a", 0), (3, "a", 1))
    broken(lanes, "a")
    assert list(queue.deferred(6.0)) == []
    assert ids(queue, lanes, 6.0) == [2]
    assert list(queue.deferred(6.0)) == []
    lanes["a"].learn(2, None, 6.1)
    lanes["a"].give_back(2, 6.1)
    assert ids(queue, lanes, 6.1) == [1, 3]
    assert not lanes.any_open


def test_the_next_probe_comes_later_when_a_probe_has_failed() -> None:
    """Whatever was said to what was under way before; a lease that ended is no success either."""
    for error in (REFUSED, Retry("another fault", fault="tls"), LeaseOver("over")):
        lanes = roads()
        queue = waiting(lanes, (1, "a", 0), (2, "a", 0))
        broken(lanes, "a")
        lanes["a"].learn(77, None, 5.0)
        assert ids(queue, lanes, 5.0) == [1]
        lanes["a"].learn(1, error, 5.0)
        lanes["a"].give_back(1, 5.0)
        assert [seconds for _, seconds in queue.deferred(5.0)] == [10.0]


def test_the_provider_is_back_when_a_probe_fails_for_a_reason_of_its_own() -> None:
    """400 Bad Request: somebody is at home."""
    lanes = roads()
    queue = waiting(lanes, (1, "a", 0))
    broken(lanes, "a")
    assert ids(queue, lanes, 5.0) == [1]
    lanes["a"].learn(1, Retry("HTTP 400"), 5.0)
    assert not lanes.any_open


def test_a_probe_is_due_again_when_its_row_could_not_be_claimed() -> None:
    """Somebody else has it; the next row is the probe, without another wait."""
    lanes = roads()
    queue = waiting(lanes, (1, "a", 0), (2, "a", 0))
    broken(lanes, "a")
    assert ids(queue, lanes, 5.0) == [1]
    assert lanes["a"].breaker.state is State.HALF_OPEN
    lanes["a"].give_back(1, 5.5)
    assert ids(queue, lanes, 5.5) == [2]


def test_candidates_keep_their_place_when_they_are_put_back() -> None:
    """A commit that was not tried with its claims changes no order."""
    lanes = roads()
    queue = waiting(lanes, (1, "a", 0), (2, "a", 0))
    lane = queue.next_lane(0.0)
    assert lane is not None
    first = queue.take(lane)
    lane.give_back(first.row_id, 0.0)
    queue.put_back(first)
    assert ids(queue, lanes) == [1, 2]
    queue.clear()
    assert len(queue) == 0
