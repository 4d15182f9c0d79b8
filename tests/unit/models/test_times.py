"""Times of the tables: aware, UTC, and right in the night when clocks change."""

from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import create_engine, insert, literal_column, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect

from models.tables import EmailDispatch, ProcessorOffset
from models.times import UtcDateTime, utc_now

PARIS = ZoneInfo("Europe/Paris")
POSTGRESQL: Dialect = postgresql.asyncpg.dialect()  # type: ignore[no-untyped-call]
SQLITE: Dialect = sqlite.aiosqlite.dialect()


@pytest.mark.parametrize("dialect", [POSTGRESQL, SQLITE])
def test_a_naive_time_is_refused(dialect: Dialect) -> None:
    """Nobody knows which zone it means; to take it for UTC would hide the mistake."""
    with pytest.raises(ValueError, match="naive"):
        UtcDateTime().process_bind_param(datetime(2026, 3, 29, 2, 30), dialect)  # noqa: DTZ001


def test_an_aware_time_is_stored_in_utc() -> None:
    """Any zone goes in; where the column has no zone, the text is UTC."""
    time = datetime(2026, 7, 1, 12, 0, tzinfo=timezone(timedelta(hours=-3)))
    assert UtcDateTime().process_bind_param(time, POSTGRESQL) == datetime(2026, 7, 1, 15, 0, tzinfo=UTC)
    for stored in (
        UtcDateTime(timezone=False).process_bind_param(time, POSTGRESQL),
        UtcDateTime().process_bind_param(time, SQLITE),
    ):
        assert stored is not None
        assert stored.isoformat() == "2026-07-01T15:00:00"


def test_what_is_read_is_aware_utc() -> None:
    """Without zone: it is UTC. With another zone: turned into UTC."""
    naive = datetime(2026, 7, 1, 15, 0)  # noqa: DTZ001
    assert UtcDateTime().process_result_value(naive, SQLITE) == datetime(2026, 7, 1, 15, 0, tzinfo=UTC)
    read = UtcDateTime().process_result_value(datetime(2026, 7, 1, 12, 0, tzinfo=ZoneInfo("America/Bahia")), POSTGRESQL)
    assert read is not None
    assert (read.hour, read.tzinfo) == (15, UTC)


def test_nothing_stays_nothing() -> None:
    """Null both ways."""
    assert UtcDateTime().process_bind_param(None, SQLITE) is None
    assert UtcDateTime().process_result_value(None, SQLITE) is None


@pytest.mark.parametrize("fold", [0, 1])
def test_a_back_off_has_its_real_length_in_the_night_when_clocks_change(fold: int) -> None:
    """The hour that comes twice, and the hour that never comes (2026-03-29T02:30 in Paris)."""
    twice = datetime(2026, 10, 25, 2, 30, tzinfo=PARIS, fold=fold)
    never = datetime(2026, 3, 29, 2, 30, tzinfo=PARIS, fold=fold)
    for start in (twice, never):
        stored = UtcDateTime().process_bind_param(start, POSTGRESQL)
        assert stored is not None
        due = UtcDateTime().process_bind_param(stored + timedelta(seconds=900), POSTGRESQL)
        assert due is not None
        assert due.timestamp() - start.timestamp() == 900


def test_times_written_by_python_and_by_sql_are_read_alike_on_sqlite() -> None:
    """Microseconds, the milliseconds of SQLite's clock, and Laravel's whole seconds, in one order."""
    engine = create_engine("sqlite://")
    wanted = {
        "2026-11-30 23:02:01": datetime(2026, 11, 30, 23, 2, 1, tzinfo=UTC),
        "2026-11-30 23:02:01.123": datetime(2026, 11, 30, 23, 2, 1, 123000, tzinfo=UTC),
        "2026-11-30 23:02:01.123456": datetime(2026, 11, 30, 23, 2, 1, 123456, tzinfo=UTC),
    }
    with engine.connect() as connection:
        for stored, time in wanted.items():
            assert connection.execute(select(literal_column(f"'{stored}'", UtcDateTime()))).scalar() == time
    assert sorted(wanted) == [stored for stored, _ in sorted(wanted.items(), key=lambda pair: pair[1])]


def test_the_databases_clock_fills_a_time_that_was_not_given() -> None:
    """`utc_now` as a default on SQLite is read back as an aware time of today."""
    engine = create_engine("sqlite://")
    table = ProcessorOffset.metadata.tables["processor_offsets"]
    table.create(engine)
    with engine.begin() as connection:
        connection.execute(insert(table).values(processor="p", stream="s", partition=0))
        read = connection.execute(select(table.c.updated_at)).scalar_one()
        assert abs(read - datetime.now(UTC)) < timedelta(minutes=1)
        assert abs(connection.execute(select(utc_now())).scalar_one() - read) < timedelta(minutes=1)


def test_every_time_column_of_the_tables_is_utc() -> None:
    """A plain DateTime would bring naive times back."""
    columns = [column for table in EmailDispatch.metadata.tables.values() for column in table.columns]
    times = [column for column in columns if column.name.endswith(("_at", "_until"))]
    assert times
    assert all(isinstance(column.type, UtcDateTime) for column in times)
