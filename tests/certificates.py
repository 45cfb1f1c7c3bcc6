"""Certificates for TLS servers and clients of the tests, made by openssl."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def create_certificates(directory: Path, address: str) -> None:
    """``ca.crt``, and ``server.crt`` and ``server.key`` for ``address``. The CA has no key usage extension, like those
    of many clusters."""
    create_ca(directory, "test CA")
    sign(directory, "server", f"subjectAltName=IP:{address}")


def create_ca(directory: Path, name: str) -> None:
    """``ca.crt`` and ``ca.key``."""
    subject = ("-subj", f"/O=tests/CN={name}")
    _openssl(directory, "req", "-x509", *_NEW_KEY, *subject, "-days", "2", "-keyout", "ca.key", "-out", "ca.crt")


def sign(directory: Path, name: str, extension: str = "extendedKeyUsage=clientAuth", days: int = 2) -> None:
    """``name.crt`` and ``name.key``, signed by the CA in ``directory``. With ``days=-1`` it has expired."""
    files = (directory / f"{name}.key", directory / f"{name}.csr")
    _openssl(directory, "req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", files[0].name, "-out", files[1].name)
    (directory / "extensions").write_text(f"{extension}\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days), "-extfile", "extensions")
    _openssl(directory, "x509", "-req", "-in", files[1].name, *signed, "-out", f"{name}.crt")


def _openssl(directory: Path, *arguments: str) -> None:
    if OPENSSL is None:
        pytest.skip("openssl is not installed")
    done = subprocess.run([OPENSSL, *arguments], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
