"""The page as a process of its own, and the command that makes its passwords."""

import aiohttp

from processors import _compose
from processors._passwords import is_password
from processors._settings import Settings
from streams.exit_codes import ExitCode
from tests.support.command import afluente
from tests.support.page import SETTINGS, AdminPage
from tests.support.pod import Pod
from tests.support.sites import Site


async def test_process_is_ready_and_serves_while_the_log_is_away(site: Site) -> None:
    """That is when people look; and it ends as all others do."""
    environment = AdminPage(site).environment | {"LOG_URL": "rabbitmq-stream://nobody:nobody@127.0.0.1:1/"}
    async with Pod(site.folder, environment, "admin") as pod:
        await pod.logged("admin.listening")
        port = pod.events("admin.listening")[0]["port"]
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/login") as answer:
            assert answer.status == 200
            assert "Entrar" in await answer.text()
        code, text = await pod.probe("/metrics")
        assert code == 200
        assert "afluente_heartbeat_timestamp_seconds" in text
        await pod.terminate()
        assert await pod.ended() == ExitCode.OK


async def test_start_without_key_or_users_names_both(embedded_site: Site) -> None:
    """A page that anybody could enter does not start."""
    environment = AdminPage(embedded_site, ADMIN_SECRET_KEY=None, ADMIN_USERS=None).environment
    done = await afluente(environment, "run", "admin")
    assert done.code == ExitCode.BAD_SETTINGS
    assert "ADMIN_SECRET_KEY is missing" in done.err
    assert "ADMIN_USERS is missing" in done.err


def test_all_includes_the_page_only_when_it_is_set_up(embedded_site: Site) -> None:
    """Whoever does not want it does not get it."""
    with_page = AdminPage(embedded_site).settings
    bare = {name.lower(): value for name, value in AdminPage(embedded_site).environment.items() if name not in SETTINGS}
    without = Settings(_env_file=None, **bare)  # type: ignore[arg-type]
    assert "admin" in _compose.all_names(with_page)
    assert "admin" not in _compose.all_names(without)


async def test_command_makes_a_hash_that_is_the_passwords(embedded_site: Site) -> None:
    """Read from standard input where there is no terminal; a short one is refused."""
    done = await afluente({}, "admin", "hash-password", stdin=b"uma senha inventada\n")
    assert (done.code, done.err) == (ExitCode.OK, "")
    assert is_password(done.out.strip(), "uma senha inventada")
    assert done.out.count("\n") == 1
    done = await afluente({}, "admin", "hash-password", stdin=b"curta\n")
    assert (done.code, done.out) == (ExitCode.BAD_INPUT, "")
