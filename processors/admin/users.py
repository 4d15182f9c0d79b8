"""Who may sign in, and what for. From the settings; there is no page that changes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal

from processors._passwords import hash_password, is_password

Role = Literal["operator", "viewer"]


@dataclass(frozen=True, slots=True)
class User:
    """One person. A viewer changes nothing."""

    name: str
    role: Role
    hash: str = field(repr=False)

    @property
    def may_change(self) -> bool:
        return self.role == "operator"

    @property
    def mark(self) -> str:
        """Changes with the password and the role, so that a session from before is none any more."""
        return sha256(f"{self.role}\n{self.hash}".encode()).hexdigest()[:16]


def parse_users(setting: str) -> dict[str, User]:
    """The users in ADMIN_USERS, which the settings have checked."""
    users = {}
    for entry in filter(None, map(str.strip, setting.split(";"))):
        name, _, rest = entry.partition(":")
        viewer = rest.startswith("viewer:")
        users[name] = User(name, "viewer" if viewer else "operator", rest.removeprefix("viewer:"))
    return users


class Users:
    """All of them. To check a password takes as long for a name that nobody has."""

    def __init__(self, users: Mapping[str, User]) -> None:
        self._users = users
        self._nobody = hash_password("a password that nobody has, for names that nobody has")

    def get(self, name: str) -> User | None:
        return self._users.get(name)

    def check(self, name: str, password: str) -> User | None:
        """The user, if this is their password. Blocks for some 50 ms."""
        user = self._users.get(name)
        right = is_password(user.hash if user is not None else self._nobody, password)
        return user if right else None
