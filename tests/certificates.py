"""Certificates for TLS servers of the tests, made by openssl."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path


def create_certificates(directory: Path, address: str) -> None:
    """``ca.crt``, and ``server.crt`` and ``server.key`` for ``address``. The CA has no key usage extension, like those
    of many clusters."""

    def openssl(*arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    new_key: Sequence[str] = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-subj", "/CN=test CA", "-days", "2", "-keyout", "ca.key", "-out", "ca.crt")
    openssl("req", *new_key, "-subj", "/CN=gateway", "-keyout", "server.key", "-out", "server.csr")
    (directory / "names").write_text(f"subjectAltName=IP:{address}\n")
    signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
    openssl("x509", "-req", "-in", "server.csr", *signed, "-out", "server.crt")
