"""Who may sign in, as the settings say it."""

import pytest

from processors._passwords import WeakPassword, hash_password, is_password
from processors._settings import Settings
from processors.admin.users import Users, parse_users

HASH = hash_password("uma senha inventada")
OTHER = hash_password("outra senha inventada")


def test_users_are_read_with_their_roles() -> None:
    """Operators change things, viewers do not; blanks and line breaks do not matter."""
    users = parse_users(f" ana:{HASH};\n bia:viewer:{OTHER} ;")
    assert {name: user.role for name, user in users.items()} == {"ana": "operator", "bia": "viewer"}
    assert [user.may_change for user in users.values()] == [True, False]
    assert users["bia"].hash == OTHER
    assert HASH not in repr(users)


def test_password_is_checked_for_its_user_only() -> None:
    """And a name that nobody has costs a check as well."""
    users = Users(parse_users(f"ana:{HASH};bia:{OTHER}"))
    assert users.check("ana", "uma senha inventada") is users.get("ana")
    assert users.check("ana", "outra senha inventada") is None
    assert users.check("nobody", "uma senha inventada") is None
    assert users.check("nobody", "a password that nobody has, for names that nobody has") is None


def test_mark_changes_with_password_and_role() -> None:
    """Sessions from before are none then."""
    marks = {parse_users(entry)["ana"].mark for entry in (f"ana:{HASH}", f"ana:{OTHER}", f"ana:viewer:{HASH}")}
    assert len(marks) == 3


@pytest.mark.parametrize("password", ["short", "x" * 1025])
def test_weak_password_is_refused(password: str) -> None:
    """Before it is hashed."""
    with pytest.raises(WeakPassword):
        hash_password(password)


@pytest.mark.parametrize("hashed", ["", "x", "$argon2id$v=19$m=1,t=1,p=1$x$y"])
def test_hash_that_is_none_is_nobodys(hashed: str) -> None:
    """A mistake in the settings lets nobody in."""
    assert not is_password(hashed, "uma senha inventada")


def test_no_password_is_anybodys_that_cannot_be_text() -> None:
    """Half a UTF-16 pair, more than a password may have."""
    assert not is_password(HASH, "\ud800")
    assert not is_password(HASH, "x" * 100_000)


BASE = {"database_url": "sqlite+aiosqlite:///x.db", "log_url": "embedded:///x.db", "_env_file": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("admin_secret_key", "too short"),
        ("admin_users", "ana"),
        ("admin_users", "ana:plain password"),
        ("admin_users", f"Ana:{HASH}"),
        ("admin_users", f"ana:{HASH};ana:viewer:{HASH}"),
        ("admin_users", ";"),
    ],
)
def test_settings_that_let_the_wrong_people_in_are_refused_without_being_shown(name: str, value: str) -> None:
    """A start fails; the message holds neither key nor hash."""
    with pytest.raises(ValueError, match=name) as caught:
        Settings(**{**BASE, name: value})  # type: ignore[arg-type]
    assert value not in str(caught.value)
