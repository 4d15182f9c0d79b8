"""The bytes of a mail, held against the email package's own parser."""

import re
from email import message_from_bytes, policy
from email.header import decode_header, make_header
from email.message import EmailMessage
from email.utils import getaddresses, parsedate_to_datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from processors.mailer.mail import BadAddress, Frame, Sender, ascii_address, message_id

FRAME = Frame(Sender("noreply@example.org", "Cultura, Secretaria da"))
ID = "<0123456789abcdef0123456789abcdef@example.org>"

texts = st.text(max_size=300)
hard_lines = st.sampled_from([".", "..", "From eve", "x" * 3000, "a  \t ", "é" * 200, "=_afluente_7c1f0e5a", "--", ""])
bodies = st.lists(st.one_of(texts, hard_lines), max_size=8).map("\n".join)


def encode(
    to: str = "ana@example.com", name: str = "Ana", subject: str = "s", text: str = "t", html: str = "<p>h</p>"
) -> bytes:
    """A mail of our frame, with what the test is not about filled in."""
    return FRAME.encode(to=to, name=name, message_id=ID, subject=subject, text=text, html=html)


def parse(mail: bytes) -> EmailMessage:
    """By the newer of the package's two parsers, which also lists defects."""
    return message_from_bytes(mail, policy=policy.default)


def header(mail: bytes, name: str) -> str:
    """Unfolded and decoded by the older of the package's two parsers."""
    return str(make_header(decode_header(message_from_bytes(mail)[name])))


def mailboxes(mail: bytes) -> list[tuple[str, str]]:
    """Names and addresses in To, by the older parser."""
    found = getaddresses([message_from_bytes(mail)["To"]])
    return [(str(make_header(decode_header(name))), address) for name, address in found]


def one_line(text: str) -> str:
    """The written rule for names and subjects."""
    return re.sub(r"[\s\x00-\x1f\x7f-\x9f]+", " ", text).strip().encode("utf-8", "replace").decode()


def plain_body(text: str) -> str:
    """The written rule for bodies, with line ends as Python has them."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "", text).encode("utf-8", "replace").decode()


def decoded(part: object) -> str:
    """The text of one part."""
    assert isinstance(part, EmailMessage)
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    return payload.decode("utf-8").replace("\r\n", "\n")


@given(name=texts, subject=texts, text=bodies, html=bodies)
@example(name="Davis, Sam (Jr.)", subject="=?utf-8?q?not_encoded?=", text=".", html=".\n.\n")
@example(name='"\\', subject="x" * 500, text="x" * 3000, html="From \nFrom ")
@example(name="Æsa Ødegård 🎉" * 15, subject="Inscrição " * 30, text="a\r\nb\rc\n", html="\0\x1b")
@example(name="a\ud800b", subject="\ud800", text="\ud800", html="")
@example(name="=?utf-8?b?QQ==?=", subject="\r\nBcc: eve@example.com", text="", html="")
def test_every_part_comes_back_and_every_line_is_legal_whatever_the_texts(
    name: str, subject: str, text: str, html: str
) -> None:
    """What the recipient's program reads is what was meant, and no server can object to the bytes."""
    mail = encode(name=name, subject=subject, text=text, html=html)

    assert mail.isascii()
    assert mail.endswith(b"\r\n")
    assert not re.search(rb"(?<!\r)\n|\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", mail)
    assert max(map(len, mail.split(b"\r\n"))) <= 78

    read = parse(mail)
    assert not read.defects
    assert [part.get_content_type() for part in read.walk()] == ["multipart/alternative", "text/plain", "text/html"]
    plain, rich = read.iter_parts()
    assert decoded(plain) == plain_body(text)
    assert decoded(rich) == plain_body(html)
    assert header(mail, "Subject") == one_line(subject)
    assert mailboxes(mail) == [(one_line(name), "ana@example.com")]


@pytest.mark.parametrize(
    "name",
    [
        "Davis, Sam (Jr.)",
        'a "quoted" \\ name',
        "Æsa Ødegård 🎉",
        "Æsa Ødegård 🎉 " * 15,
        "x" * 250,
        "ana@example.org, eve@example.org",
        "=?utf-8?b?QQ==?=",
        "Ana <eve@example.com>",
    ],
)
def test_to_is_exactly_one_mailbox_for_both_parsers_when_the_name_is_hard(name: str) -> None:
    """A comma, an at sign or an encoded look in a name makes no second recipient."""
    mail = encode(name=name)
    (to,) = parse(mail)["To"].addresses
    assert to.addr_spec == "ana@example.com"
    # The newer parser leaves the blank between two encoded words standing, against RFC 2047: compare without blanks.
    assert to.display_name.replace(" ", "") == name.replace(" ", "")
    assert mailboxes(mail) == [(name.strip(), "ana@example.com")]


@pytest.mark.parametrize("name", ["Ana Exemplo", "José da Conceição", 'Davis, "Sam"', "", "x" * 300])
def test_envelope_headers_are_those_of_the_sender_in_every_mail(name: str) -> None:
    """What is the same for all mails is there once, whatever changes around it."""
    read = parse(encode(name=name))
    assert [str(a) for a in read["From"].addresses] == ['"Cultura, Secretaria da" <noreply@example.org>']
    assert read["Message-ID"] == ID
    assert read["MIME-Version"] == "1.0"
    assert read["Auto-Submitted"] == "auto-generated"
    assert parsedate_to_datetime(read["Date"]).utcoffset() is not None
    assert sorted(read.keys()) == sorted(set(read.keys()))
    assert not [header for header in read if header.startswith("List-") or header == "Reply-To"]


def test_reply_to_and_list_headers_are_there_only_when_they_are_set() -> None:
    """They speak to mail programs, so that they must not appear by accident."""
    frame = Frame(
        Sender(
            "a@example.org", reply_to="help@example.org", list_headers=(("List-Unsubscribe", "<mailto:u@example.org>"),)
        )
    )
    read = parse(frame.encode(to="b@example.com", name="", message_id=ID, subject="s", text="t", html="h"))
    assert read["From"] == "a@example.org"
    assert read["To"] == "b@example.com"
    assert read["Reply-To"] == "help@example.org"
    assert read["List-Unsubscribe"] == "<mailto:u@example.org>"


@pytest.mark.parametrize(
    "sender",
    [
        Sender("a@example.org\r\nBcc: eve@example.com"),
        Sender("a@example.org", reply_to="b@example.org, c@example.org"),
        Sender("a@example.org", list_headers=(("List-Id", "x\r\nBcc: eve@example.com"),)),
        Sender("a@example.org", list_headers=(("Bcc", "eve@example.com"),)),
    ],
)
def test_sender_is_refused_when_it_could_not_be_written_down(sender: Sender) -> None:
    """A setting cannot smuggle a header in."""
    with pytest.raises(ValueError, match=r"address|header"):
        Frame(sender)


@pytest.mark.parametrize("address", ["try..this@example.com", "ana.@example.com", ".ana@example.com"])
def test_odd_dots_stay_as_they_are_and_can_be_parsed(address: str) -> None:
    """Such mailboxes exist; removing a dot may reach another person."""
    assert ascii_address(address) == address
    (mailbox,) = parse(encode(to=address))["To"].addresses
    assert f"{mailbox.username}@{mailbox.domain}" == address


@pytest.mark.parametrize(
    "address",
    [
        "sam@example.com\n",
        "sam@example.com\r\nRCPT TO:<eve@example.com>",
        "sam@example.com\u0000",
        "sam@example.com ",
        "sam@example.com,eve@example.com",
        "sam@example.com;eve@example.com",
        "<sam@example.com>",
        "Sam <sam@example.com>",
        "sam@eve@example.com",
        "sam",
        "@example.com",
        "sam@",
        "sam@exa\u2028mple.com",
        "sam@ex\u2100mple.com",
        "sam@ex\u2474.com",
        "x" * 250 + "@example.com",
        "sam@" + "ü" * 70 + ".example",
        "",
    ],
)
def test_address_is_refused_when_it_is_not_exactly_one(address: str) -> None:
    """Before a byte is written, so that nobody else can be addressed."""
    with pytest.raises(BadAddress) as caught:
        encode(to=address)
    assert caught.value.reason == "invalid_address"
    assert "example" not in str(caught.value)


def test_address_is_refused_by_its_own_name_when_it_needs_smtputf8() -> None:
    """The reason tells a person what to do: nothing is wrong but the server's abilities."""
    with pytest.raises(BadAddress) as caught:
        ascii_address("josé@example.com")
    assert caught.value.reason == "needs_smtputf8"


def test_domain_becomes_ascii_when_it_is_international() -> None:
    """Every server understands that form."""
    assert ascii_address("ana@exämple.com") == "ana@xn--exmple-cua.com"


@given(st.text(max_size=60))
def test_address_is_one_safe_ascii_word_or_refused_whatever_it_is(address: str) -> None:
    """The result goes into an SMTP command as it is."""
    try:
        written = ascii_address(address)
    except BadAddress:
        return
    assert re.fullmatch(r"[!-~]+", written)
    assert not re.search(r'[<>()\[\],;:\\"]', written)
    assert written.count("@") == 1


def test_message_id_is_the_same_in_every_attempt_and_tells_nothing() -> None:
    """It is made from the idempotency key, which is a hash."""
    assert message_id("ab" * 32, "example.org") == "<abababababababababababababababab@example.org>"
