"""`afluente admin`: what the operators' page needs of its owner. The page itself is run by `afluente run admin`."""

import getpass
import sys

import typer

from processors._console import fail, out
from processors._passwords import WeakPassword, hash_password
from streams.exit_codes import ExitCode

app = typer.Typer(help="The operators' page: passwords of its users.", no_args_is_help=True)


@app.callback()
def admin() -> None:
    """Keep `hash-password` a word of its own, also while it is the only one."""


@app.command("hash-password")
def hash_password_() -> None:
    """Read a password, twice and unseen on a terminal, else as one line; write its hash for ADMIN_USERS."""
    try:
        out.print(hash_password(_read()), markup=False)
    except WeakPassword as error:
        raise fail(ExitCode.BAD_INPUT, str(error)) from None


def _read() -> str:
    if not sys.stdin.isatty():
        return sys.stdin.readline().rstrip("\r\n")
    password = getpass.getpass("Password: ")
    if getpass.getpass("Again: ") != password:
        raise WeakPassword("the two are not the same")
    return password
