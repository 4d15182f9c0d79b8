"""What may change something: only what a page of ours has sent; and where a sign-in may lead."""

import pytest
from starlette.datastructures import Headers

from processors.admin.access import safe_next
from processors.admin.forms import Form
from processors.admin.guard import HEADERS, is_ours

HOST = {"host": "admin.example.org"}


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "same-origin"},
        {"origin": "https://admin.example.org"},
        {"origin": "http://admin.example.org", "sec-fetch-site": "same-origin"},
        {"origin": "https://ADMIN.example.org"},
    ],
)
def test_form_of_our_own_page_is_ours(headers: dict[str, str]) -> None:
    """A proxy may have taken TLS off, so that the scheme says nothing."""
    assert is_ours(Headers(HOST | headers))


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"origin": "null"},
        {"origin": "https://evil.example.com"},
        {"origin": "https://admin.example.org.evil.example.com"},
        {"origin": "https://admin.example.org:8443"},
        {"origin": "https://evil.example.com", "sec-fetch-site": "same-origin"},
        {"origin": "https://admin.example.org", "sec-fetch-site": "cross-site"},
    ],
)
def test_form_of_anybody_else_is_not(headers: dict[str, str]) -> None:
    """Neighbours on other ports and names included; and who says nothing is no browser."""
    assert not is_ours(Headers(HOST | headers))


@pytest.mark.parametrize("path", ["/", "/events", "/events/12", "/requests/new", "/emails"])
def test_sign_in_leads_back_to_pages_of_ours(path: str) -> None:
    """Whence the person came."""
    assert safe_next(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "//evil.example.com",
        "https://evil.example.com",
        "/\\evil.example.com",
        "/events?x=1",
        "javascript:x",
        "/a/b/c",
        "",
    ],
)
def test_sign_in_leads_nowhere_else(path: str) -> None:
    """A link that somebody sent does not end on their site."""
    assert safe_next(path) in {"/", path if path == "" else "/"}


def test_rules_allow_nothing_inline() -> None:
    """What is not forbidden would run."""
    rules = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    assert "frame-ancestors 'none'" in rules


def test_numbers_of_a_form_are_those_of_rows() -> None:
    """Whatever else somebody writes there is left out."""
    values = ["1", "22", "-3", "x", "1.5", "9" * 30, "", "٣"]
    assert Form([("id", value) for value in values]).numbers("id") == [1, 22]
