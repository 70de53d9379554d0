"""Exported weights that only the holders of certain keys can read, in the format of age (filippo.io/age).

recipients = parse_recipients(["age1...", "ssh-ed25519 ..."])   # raises RequestError
encrypt_files(folder, recipients)                               # x becomes x.age; age -d -i key reads it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wire_format import RequestError

SUFFIX = ".age"
MOST_RECIPIENTS = 10


def parse_recipients(value: Any) -> list[Any]:
    """The public keys that a client names, at most `MOST_RECIPIENTS`; none when it names none.

    Raises `RequestError` for what is no native age key and no SSH public key.
    """
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MOST_RECIPIENTS:
        raise RequestError(f"age_encryption_recipients must be a list of at most {MOST_RECIPIENTS} public keys")
    return [_parse(key) for key in value]


def encrypt_files(folder: Path, recipients: list[Any]) -> None:
    """Replace every file in `folder` by its encrypted form."""
    import pyrage

    for path in sorted(folder.iterdir()):
        pyrage.encrypt_file(str(path), f"{path}{SUFFIX}", recipients)
        path.unlink()


def _parse(key: Any) -> Any:
    import pyrage

    kind = pyrage.ssh if isinstance(key, str) and key.startswith("ssh-") else pyrage.x25519
    try:
        return kind.Recipient.from_str(key)
    except (pyrage.RecipientError, TypeError) as err:
        raise RequestError(
            f"age_encryption_recipients: {key!r} is no public key of age (age1...) and no SSH public key ({err})"
        ) from err
