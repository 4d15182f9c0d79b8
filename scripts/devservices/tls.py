"""A certificate authority of our own and one server certificate for localhost, made once by openssl."""

import shutil
import subprocess
from pathlib import Path

from scripts.devservices.places import TLS, die

_NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


def make_certificates() -> None:
    """Write ca.pem, server.pem and server.key into the folder TLS, unless they are there and last another week."""
    if _good_for_a_week(TLS / "server.pem"):
        return
    if not shutil.which("openssl"):
        die("openssl is missing; install the package openssl")
    TLS.mkdir(parents=True, exist_ok=True)
    ca = ["-CA", str(TLS / "ca.pem"), "-CAkey", str(TLS / "ca.key")]
    _certificate("ca", "/CN=Afluente development CA", ["-addext", "keyUsage=critical,keyCertSign,cRLSign"])
    _certificate("server", "/CN=localhost", [*ca, "-addext", _NAMES, "-addext", "basicConstraints=critical,CA:FALSE"])
    (TLS / "server.key").chmod(0o644)  # read by the broker's user; these keys protect nothing


def _certificate(name: str, subject: str, more: list[str]) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-sha256", "-days", "365", "-subj", subject]
    files = ["-keyout", str(TLS / f"{name}.key"), "-out", str(TLS / f"{name}.pem")]
    done = subprocess.run([*command, *files, *more], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        die(f"openssl made no certificate:\n{done.stderr}")


def _good_for_a_week(certificate: Path) -> bool:
    if not certificate.exists():
        return False
    check = ["openssl", "x509", "-checkend", str(7 * 24 * 3600), "-noout", "-in", str(certificate)]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0
