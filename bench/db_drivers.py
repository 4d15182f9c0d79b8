"""asyncpg against psycopg 3 on the two statements that decide: insert 500 rows or ignore them, record 8 outcomes.

    python -m pip install asyncpg "psycopg[binary]" uvloop
    python bench/db_drivers.py postgresql://postgres@127.0.0.1:28432/postgres

psycopg is no dependency of the project: use a virtual environment of its own. Rows travel as one JSON parameter. The
drivers take turns (A B A B ...) in one process, on uvloop as in the product. Figures are the median and the range of
the rounds: CPU of this process (not the server's) and wall time, in microseconds. The tables are temporary.
"""

import json
import statistics
import sys
import time
from typing import Any, Protocol

import asyncpg
import psycopg
import uvloop

ROUNDS, ROWS, GROUP = 7, 500, 8
GROUPS = ROWS // GROUP

SCHEMA = """
CREATE TEMPORARY TABLE bench_rows (id bigserial PRIMARY KEY, "to" text NOT NULL, content text NOT NULL,
    key varchar(64) UNIQUE, status text, attempts int NOT NULL DEFAULT 0, sent_at timestamptz);
CREATE TEMPORARY TABLE bench_offsets (partition int PRIMARY KEY, next_offset bigint NOT NULL);
INSERT INTO bench_offsets VALUES (0, 0)"""
INSERT = """
INSERT INTO bench_rows ("to", content, key, status)
SELECT "to", content, key, 'pending' FROM json_to_recordset({0}::json) AS r ("to" text, content text, key text)
ON CONFLICT (key) DO NOTHING RETURNING id, key"""
RECORD = """
WITH outcome AS (
    UPDATE bench_rows AS b SET status = 'sent', attempts = r.attempts, sent_at = now()
    FROM json_to_recordset({0}::json) AS r (id bigint, attempts int) WHERE b.id = r.id RETURNING b.id
), advance AS (
    UPDATE bench_offsets SET next_offset = {1}::bigint WHERE partition = 0 RETURNING next_offset
)
SELECT (SELECT count(*) FROM outcome), (SELECT next_offset FROM advance)"""


class Driver(Protocol):
    """One statement in, its rows out, committed."""

    async def script(self, statements: str) -> None: ...
    async def fetch(self, statement: str, *values: Any) -> list[Any]: ...
    async def close(self) -> None: ...


class Asyncpg:
    """Prepares by itself and keeps what it prepared."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection

    @classmethod
    async def open(cls, url: str) -> Driver:
        return cls(await asyncpg.connect(url))

    async def script(self, statements: str) -> None:
        await self.connection.execute(statements)

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        return list(await self.connection.fetch(statement.format("$1", "$2"), *values))

    async def close(self) -> None:
        await self.connection.close()


class Psycopg:
    """Prepared at the first use, autocommit, C implementation, binary results."""

    def __init__(self, connection: "psycopg.AsyncConnection[Any]") -> None:
        self.connection = connection

    @classmethod
    async def open(cls, url: str) -> Driver:
        return cls(await psycopg.AsyncConnection.connect(url, autocommit=True, prepare_threshold=0))

    async def script(self, statements: str) -> None:
        await self.connection.execute(statements)

    async def fetch(self, statement: str, *values: Any) -> list[Any]:
        cursor = self.connection.cursor(binary=True)
        await cursor.execute(statement.format("%s", "%s"), values)
        return list(await cursor.fetchall())

    async def close(self) -> None:
        await self.connection.close()


class Clock:
    """CPU and wall time of a block, divided by the number of things done in it, in microseconds."""

    def __init__(self, things: int) -> None:
        self.things = things

    def __enter__(self) -> "Clock":
        self.begun = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu = (time.process_time() - self.begun[0]) / self.things * 1e6
        self.wall = (time.perf_counter() - self.begun[1]) / self.things * 1e6


async def turn(driver: Driver, number: int) -> dict[str, tuple[float, float]]:
    """Insert 500 new rows, insert them again (all ignored), record them in groups of 8."""
    rows = json.dumps([
        {"to": f"user{n}@example.com", "content": "Recebemos a sua inscrição. " * 75, "key": f"{number:032x}{n:032x}"}
        for n in range(ROWS)
    ])  # fmt: skip
    with Clock(ROWS) as inserted:
        ids = [row[0] for row in await driver.fetch(INSERT, rows)]
    with Clock(ROWS) as ignored:
        assert await driver.fetch(INSERT, rows) == []
    groups = [json.dumps([{"id": n, "attempts": 1} for n in ids[i : i + GROUP]]) for i in range(0, ROWS, GROUP)]
    with Clock(GROUPS) as recorded:
        for position, group in enumerate(groups[:GROUPS]):
            ((count, _),) = [tuple(row) for row in await driver.fetch(RECORD, group, number * ROWS + position)]
            assert count == GROUP
    return {
        "insert, per row": (inserted.cpu, inserted.wall),
        "ignore, per row": (ignored.cpu, ignored.wall),
        "record, per group of 8": (recorded.cpu, recorded.wall),
    }


async def main(url: str) -> None:
    """Warm up, then let the drivers take turns."""
    drivers: dict[str, Driver] = {"asyncpg": await Asyncpg.open(url), "psycopg": await Psycopg.open(url)}
    seen: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for driver in drivers.values():
        for statement in SCHEMA.split(";"):
            await driver.script(statement)
        await turn(driver, 0)
    for number in range(1, ROUNDS + 1):
        for name, driver in drivers.items():
            for what, figures in (await turn(driver, number)).items():
                seen.setdefault((what, name), []).append(figures)
    print(f"asyncpg {asyncpg.__version__}, psycopg {psycopg.__version__} ({psycopg.pq.__impl__}), {ROUNDS} rounds")
    for (what, name), each in sorted(seen.items()):
        cpu, wall = ([figures[i] for figures in each] for i in (0, 1))
        print(
            f"{what:24} {name:8} CPU {statistics.median(cpu):6.1f} ({min(cpu):.1f}-{max(cpu):.1f})"
            f"   wall {statistics.median(wall):7.1f} ({min(wall):.1f}-{max(wall):.1f})"
        )
    for driver in drivers.values():
        await driver.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
