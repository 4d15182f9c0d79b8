"""Waits after wrong passwords: they grow, they end, and a stranger cannot make somebody else's last."""

import pytest

from processors.admin.lockout import FIRST_WAIT, FORGET, FREE, LONGEST_WAIT, MOST_KEYS, Lockout, keys_of
from streams.testing import MovableClock

ANA = keys_of("ana", "192.0.2.1", None)


def guess(lockout: Lockout, user: str = "ana", address: str = "192.0.2.1", device: str | None = None) -> float:
    """One wrong password; the wait, 0 if it was looked at."""
    return lockout.begin(keys_of(user, address, device))


def test_some_mistakes_are_free_and_then_there_is_a_wait() -> None:
    """The fifth is looked at, the sixth is not."""
    clock = MovableClock()
    lockout = Lockout(clock.monotonic)
    assert [guess(lockout) for _ in range(FREE["user"])] == [0.0] * FREE["user"]
    assert guess(lockout) == FIRST_WAIT
    clock.advance(FIRST_WAIT)
    assert guess(lockout) == 0.0


def test_wait_doubles_up_to_a_quarter_of_an_hour() -> None:
    """No wait is longer, whatever somebody does."""
    clock = MovableClock()
    lockout = Lockout(clock.monotonic)
    waits = []
    for _ in range(FREE["user"] + 8):
        if wait := guess(lockout):
            waits.append(wait)
            clock.advance(wait)
            assert guess(lockout) == 0.0
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 900.0, 900.0, 900.0]
    assert max(waits) <= LONGEST_WAIT


def test_tries_during_the_wait_do_not_make_it_longer() -> None:
    """Else a stranger could keep somebody out by trying all day."""
    clock = MovableClock()
    lockout = Lockout(clock.monotonic)
    for _ in range(FREE["user"]):
        guess(lockout)
    for _ in range(1000):
        assert guess(lockout) > 0
    clock.advance(FIRST_WAIT)
    assert guess(lockout) == 0.0


def test_many_tries_at_once_are_not_more_than_one_after_the_other() -> None:
    """Each counts before its password is looked at."""
    lockout = Lockout(MovableClock().monotonic)
    assert sum(guess(lockout) == 0.0 for _ in range(100)) == FREE["user"]


def test_right_password_ends_the_counting() -> None:
    """Four mistakes and a success, again and again."""
    lockout = Lockout(MovableClock().monotonic)
    for _ in range(20):
        for _ in range(FREE["user"] - 1):
            assert lockout.begin(ANA[:1]) == 0.0
        assert lockout.begin(ANA[:1]) == 0.0
        lockout.succeeded(ANA[:1])


def test_browser_in_which_the_person_has_signed_in_is_not_locked_by_strangers() -> None:
    """It has a counter of its own, which bounds guesses from there as well."""
    lockout = Lockout(MovableClock().monotonic)
    for n in range(50):
        guess(lockout, address=f"192.0.2.{n}")
    assert guess(lockout, address="203.0.113.9") > 0
    assert [guess(lockout, device="hers") for _ in range(FREE["device"])] == [0.0] * FREE["device"]
    assert guess(lockout, device="hers") > 0


def test_address_that_guesses_at_many_users_is_locked() -> None:
    """One guess at each of many names is no way around the counters of users."""
    lockout = Lockout(MovableClock().monotonic)
    looked_at = sum(guess(lockout, user=f"user{n}") == 0.0 for n in range(200))
    assert looked_at <= FREE["address"]


def test_right_password_does_not_free_an_address_for_guesses_at_others() -> None:
    """Who has an account and guesses at others' gets no more guesses by signing in between."""
    lockout = Lockout(MovableClock().monotonic)
    guesses = 0
    for n in range(100):
        if guess(lockout, user=f"user{n}") > 0:
            break
        guesses += 1
        own = keys_of("thief", "192.0.2.1", None)
        if lockout.begin(own) == 0.0:
            lockout.succeeded(own)
    assert guesses <= FREE["address"]


def test_counter_is_forgotten_after_an_hour_without_a_mistake() -> None:
    """A typo each day locks nobody out."""
    clock = MovableClock()
    lockout = Lockout(clock.monotonic)
    for _ in range(3 * FREE["user"]):
        assert guess(lockout) == 0.0
        clock.advance(FORGET + 1)


def test_addresses_of_one_network_are_one() -> None:
    """Whoever has an IPv6 address has 2^64 of them."""
    assert keys_of("ana", "2001:db8::1", None) == keys_of("ana", "2001:db8::2:3", None)
    assert keys_of("ana", "2001:db8::1", None) != keys_of("ana", "2001:db8:0:1::1", None)
    assert keys_of("ana", "192.0.2.1", None) != keys_of("ana", "192.0.2.2", None)


@pytest.mark.parametrize("name", ["nobody", "\ud800", "x" * 10_000])
def test_name_that_nobody_has_locks_like_any_other(name: str) -> None:
    """The page tells no names by how it locks."""
    lockout = Lockout(MovableClock().monotonic)
    assert [guess(lockout, user=name) for _ in range(FREE["user"])] == [0.0] * FREE["user"]
    assert guess(lockout, user=name) == FIRST_WAIT


def test_memory_is_bounded_and_who_is_locked_longest_stays_locked() -> None:
    """A crowd of addresses makes no room for itself."""
    lockout = Lockout(MovableClock().monotonic)
    for _ in range(FREE["user"]):
        guess(lockout)
    for n in range(MOST_KEYS + 500):
        lockout.begin([("address", str(n))])
    assert len(lockout._counts) <= MOST_KEYS
    assert guess(lockout) > 0
