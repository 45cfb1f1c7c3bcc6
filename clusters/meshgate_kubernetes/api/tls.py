"""TLS towards the API server: one context for its HTTP requests and its websockets."""

from __future__ import annotations

import ssl
from typing import Any


def ssl_context(configuration: Any) -> ssl.SSLContext:
    """The context of a ``kubernetes.client.Configuration``.

    Python 3.13 and later reject CAs without a key usage extension (``VERIFY_X509_STRICT``), among them those of many
    clusters. That check is cleared for a CA that the configuration names, because the user has chosen that very CA; it
    stays for the CAs of the system.
    """
    ca_data = getattr(configuration, "ca_cert_data", None)
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert, cadata=ca_data)
    if configuration.ssl_ca_cert or ca_data:
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    elif configuration.assert_hostname is False:
        context.check_hostname = False
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def certificate_problem(error: BaseException | None) -> str | None:
    """Why the server's certificate was rejected, if that is what caused ``error``; otherwise None."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error.verify_message or str(error)
        error = error.__cause__ or error.__context__
    return None
