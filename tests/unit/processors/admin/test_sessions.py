"""Sessions: who they are of, when they end, and that nothing but our key makes one."""

from processors.admin.sessions import DEVICE_SECONDS, LOGIN_SECONDS, RENEW_SECONDS, Sessions
from streams.testing import MovableClock

KEY = "an invented key of more than thirty-two bytes"


def sessions(clock: MovableClock, key: str = KEY) -> Sessions:
    """Idle for half an hour at most, eight hours in all."""
    return Sessions(key, 1800, 8 * 3600, clock.time)


def test_session_is_read_from_its_cookie() -> None:
    """The same person, the same id."""
    mine = sessions(MovableClock())
    begun = mine.begin("ana", "mark")
    assert mine.read(mine.write(begun)) == begun


def test_cookie_of_another_key_or_changed_or_missing_is_no_session() -> None:
    """Only who has the key makes sessions."""
    clock = MovableClock()
    mine = sessions(clock)
    cookie = mine.write(mine.begin("ana", "mark"))
    theirs = sessions(clock, KEY + "!").write(mine.begin("ana", "mark"))
    for bad in (None, "", "x", theirs, cookie[:-2], "x" + cookie, mine.device("ana")):
        assert mine.read(bad) is None


def test_session_ends_when_nobody_clicks() -> None:
    """Half an hour after the last cookie."""
    clock = MovableClock()
    mine = sessions(clock)
    cookie = mine.write(mine.begin("ana", "mark"))
    clock.advance(1799)
    assert mine.read(cookie) is not None
    clock.advance(1)
    assert mine.read(cookie) is None


def test_session_ends_after_eight_hours_although_somebody_clicks() -> None:
    """A cookie that was stolen and is kept warm ends as well."""
    clock = MovableClock()
    mine = sessions(clock)
    session = mine.begin("ana", "mark")
    for _ in range(8 * 60 - 1):
        clock.advance(60)
        renewed = mine.renewed(session)
        assert renewed is not None
        session = renewed
    assert mine.read(mine.write(session)) is not None
    clock.advance(60)
    renewed = mine.renewed(session)
    assert renewed is not None
    assert mine.read(mine.write(renewed)) is None


def test_cookie_is_not_written_anew_with_every_click() -> None:
    """Once a minute is enough."""
    clock = MovableClock()
    mine = sessions(clock)
    session = mine.begin("ana", "mark")
    clock.advance(RENEW_SECONDS - 1)
    assert mine.renewed(session) is None


def test_session_that_was_ended_is_none_any_more() -> None:
    """Whoever has a copy of the cookie."""
    mine = sessions(MovableClock())
    session, other = mine.begin("ana", "mark"), mine.begin("ana", "mark")
    mine.end(session)
    assert mine.read(mine.write(session)) is None
    assert mine.read(mine.write(other)) == other


def test_form_for_signing_in_ends_by_itself() -> None:
    """A session of nobody lasts an hour, however short those of people are."""
    clock = MovableClock()
    mine = sessions(clock)
    cookie = mine.write(mine.begin())
    clock.advance(LOGIN_SECONDS - 1)
    assert mine.read(cookie) is not None
    clock.advance(1)
    assert mine.read(cookie) is None


def test_token_belongs_to_one_session() -> None:
    """That of another person, or of nobody, is none."""
    mine = sessions(MovableClock())
    ana, bia = mine.begin("ana"), mine.begin("bia")
    assert mine.is_token(ana, mine.token(ana))
    for bad in ("", mine.token(bia), mine.token(ana)[:-1], "\ud800"):
        assert not mine.is_token(ana, bad)


def test_browser_is_known_to_who_has_signed_in_there() -> None:
    """To nobody else, and not for ever."""
    clock = MovableClock()
    mine = sessions(clock)
    cookie = mine.device("ana")
    assert mine.known_device(cookie, "ana")
    assert mine.known_device(cookie, "bia") is None
    assert mine.known_device(mine.write(mine.begin("ana")), "ana") is None
    assert mine.known_device(None, "ana") is None
    clock.advance(DEVICE_SECONDS)
    assert mine.known_device(cookie, "ana") is None
