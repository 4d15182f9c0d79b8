"""The demo's mail server as a process of its own: what it says it has got must survive it."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import aiosmtplib
import pytest

MAIL = b"Subject: x\r\nMessage-ID: <1@example.org>\r\n\r\n.\r\nOl\xc3\xa1\r\n"
SCRIPT = [{"at": "rcpt", "reply": "451 4.7.1 later", "recipient": "late-*@example.com", "times": 1}]


async def test_log_has_every_mail_that_was_answered_when_the_server_is_killed(tmp_path: Path) -> None:
    """Each line is written before its mail is answered; each recipient of a pattern is counted by himself."""
    log = tmp_path / "mails.jsonl"
    command = [sys.executable, "-m", "processors._demo.sink", "--log", str(log), "--script", json.dumps(SCRIPT)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout
        port = int((await process.stdout.readline()).rsplit(b":")[-1])
        async with aiosmtplib.SMTP(hostname="127.0.0.1", port=port, start_tls=False) as client:
            for name in ("late-a", "late-b"):
                with pytest.raises(aiosmtplib.SMTPRecipientsRefused):
                    await client.sendmail("a@example.org", [f"{name}@example.com"], MAIL)
            for name in ("late-a", "late-b", "ana"):
                await client.sendmail("a@example.org", [f"{name}@example.com"], MAIL)
            process.send_signal(signal.SIGKILL)
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

    mails = [json.loads(line) for line in log.read_text("utf-8").splitlines()]
    assert [m["recipients"] for m in mails] == [["late-a@example.com"], ["late-b@example.com"], ["ana@example.com"]]
    assert {(m["sender"], m["message_id"], m["raw"].encode("latin-1")) for m in mails} == {
        ("a@example.org", "<1@example.org>", MAIL)
    }
