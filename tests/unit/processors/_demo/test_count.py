"""What the demo ends with, and that it says so when it does not add up."""

import re
from dataclasses import replace

import pytest

from processors._demo.count import Result, Rows, disagreements, result

KEYS = [str(number) * 64 for number in range(5)]
IDS = [f"<{key[:32]}@example.org>" for key in KEYS]
ROWS = Rows(received=9, sent_ids=IDS, failed=1, rejected=2, duplicates=1)
FAILED_KEY = "f" * 64
REDELIVERED = [*KEYS, FAILED_KEY]
GOOD = Result(
    received=9,
    sent=5,
    failed=1,
    rejected=2,
    duplicates_in_batch=1,
    suppressed_on_redelivery=6,
    mails_at_sink=5,
    mailed_twice=0,
)


def test_numbers_are_those_of_rows_mail_server_and_stream() -> None:
    """Each from where it cannot be wished for."""
    assert result(ROWS, IDS, 5, REDELIVERED) == GOOD
    assert disagreements(GOOD, ROWS, IDS, 9) == []


def test_mail_of_the_second_delivery_is_not_suppressed_but_twice() -> None:
    """A mail that arrives again after the second delivery counts against both."""
    mails = [*IDS, IDS[0]]

    found = result(ROWS, mails, 5, REDELIVERED)

    assert (found.suppressed_on_redelivery, found.mails_at_sink, found.mailed_twice) == (5, 6, 1)
    assert len(disagreements(found, ROWS, mails, 9)) == 3


def test_mail_sent_twice_by_the_first_delivery_is_counted_once_as_twice() -> None:
    """Three mails under one Message-ID are one recipient who got it more than once."""
    assert result(ROWS, [*IDS, IDS[0], IDS[0]], 7, REDELIVERED).mailed_twice == 1


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (replace(GOOD, received=8), "9 were published, but 8 received"),
        (replace(GOOD, failed=2, suppressed_on_redelivery=7), "9 were received, but sent .* are 10"),
        (replace(GOOD, mails_at_sink=6), "5 rows are sent, but the mail server has 6 mails"),
        (replace(GOOD, mailed_twice=1), "1 mails arrived more than once"),
        (replace(GOOD, suppressed_on_redelivery=5), "the second delivery left 5 unmailed"),
    ],
)
def test_equation_that_does_not_hold_is_named(found: Result, says: str) -> None:
    """The sentence says which, with both numbers."""
    sentences = disagreements(found, ROWS, IDS, 9)

    assert any(re.search(says, sentence) for sentence in sentences)


def test_mail_without_its_row_is_named_when_the_numbers_are_equal() -> None:
    """As many mails as rows is not enough: they must be the same ones."""
    mails = [*IDS[1:], "<stranger@example.org>"]

    assert disagreements(GOOD, ROWS, mails, 9) == [
        "1 mails arrived whose rows do not say sent",
        "1 rows say sent, but no mail arrived",
    ]
