"""How PostgreSQL compresses the contents of mails."""

from processors._migrate import downgrade, migrate
from streams.database import connect
from tests.support.databases import query

METHOD = "SELECT pg_column_compression(content) AS method FROM email_dispatches ORDER BY id DESC LIMIT 1"


async def test_contents_are_compressed_quickly_and_as_before_when_that_is_taken_back(postgres_url: str) -> None:
    """LZ4 where the server can do it, as Debian's and the official image can."""
    await migrate(postgres_url)
    assert await _method_of_a_new_row(postgres_url) == "lz4"
    await downgrade(postgres_url, "0010")
    assert await _method_of_a_new_row(postgres_url) == "pglz"


async def _method_of_a_new_row(url: str) -> str:
    engine = connect(url, "test")
    try:
        await query(
            engine,
            """INSERT INTO email_dispatches ("to", subject, content, mailable_type)
            VALUES ('ana@example.com', 's', repeat('<p>Uma linha.</p>', 400), 'm')""",
        )
        [row] = await query(engine, METHOD)
        return str(row["method"])
    finally:
        await engine.dispose()
