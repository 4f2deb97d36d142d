"""Emulators of object stores, in threads of this process."""

from __future__ import annotations

import logging
import secrets
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

SECRET = secrets.token_hex(16)
"""Key of the S3 store, which nothing may show."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def keep_carriage_returns(read: Callable[[Any], bytes | None]) -> Callable[[Any], bytes | None]:
    """Let Google's emulator keep the end of files that end in a carriage return.

    gcsfs writes a line feed before the end of an upload, and the emulator's parser takes a carriage
    return before it for a part of that line's end.
    """
    end = b"\n--==0==--"

    def read_data(handler: Any) -> bytes | None:
        data = read(handler)
        return data[: -len(end)] + b"\r" + end if data and data.endswith(end) else data

    return read_data


@contextmanager
def object_stores() -> Iterator[dict[str, str]]:
    """Serve Google's and Amazon's protocols, each with an empty bucket `bucket`; the environment
    that leads to them.
    """
    from gcp_storage_emulator import server
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    gcs_port, s3_port = free_port(), free_port()
    google = server.create_server("127.0.0.1", gcs_port, in_memory=True, default_bucket="bucket")
    amazon = ThreadedMotoServer(ip_address="127.0.0.1", port=s3_port, verbose=False)
    google.start()
    # Its queue holds five connections; a client that finds it full tries again after a second.
    listening = google._api._httpd
    assert listening is not None
    listening.socket.listen(128)
    amazon.start()
    url = f"http://127.0.0.1:{s3_port}"
    urllib.request.urlopen(
        urllib.request.Request(f"{url}/bucket", method="PUT"), timeout=120
    ).close()
    try:
        with patch.object(server, "_read_raw_data", keep_carriage_returns(server._read_raw_data)):
            yield {
                "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{gcs_port}",
                "NO_GCE_CHECK": "true",
                # Asks Google for the type of the bucket, with credentials that an emulator has not.
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": "areal",
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_DEFAULT_REGION": "us-east-1",
            }
    finally:
        google.stop()
        amazon.stop()
