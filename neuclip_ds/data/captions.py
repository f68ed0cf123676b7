"""Extract a sample's captions from its members and its JSON; if there are several, training draws one.

`data.captions` lists sources: `txt` is the whole text member, `txt:lines` each of its lines, `json:KEY` the string or
list of strings under a key of the JSON member (where recaptioned data sets keep them).

A caption is text that every tokenizer takes: invalid UTF-8 and lone surrogates (which JSON can spell, and no encoding
holds) become U+FFFD, NUL a space, and what follows the first 10,000 characters is cut off.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from neuclip_ds.errors import UserError

TEXT, JSON = "txt", "json"
_LINES = "lines"
_SURROGATE = re.compile("[\ud800-\udfff]")
_MAX_CHARACTERS = 10_000  # more than the context of any text tower; megabytes would take a tokenizer seconds


class _Source(NamedTuple):
    extension: str
    key: str  # key of the JSON; for text `lines` or empty


class Captions:
    """Caption sources as `data.captions` names them.

    Attributes:
        extensions: members that the sources read.

    Raises:
        UserError: there is no source, or one has an unknown form.
    """

    def __init__(self, names: Sequence[str] = (TEXT,)) -> None:
        self._sources = [_parse(name) for name in names]
        if not self._sources:
            raise UserError("data.captions is empty; name a source of captions, such as txt.")
        self.extensions = tuple(dict.fromkeys(source.extension for source in self._sources))

    def of(self, members: Mapping[str, bytes]) -> list[str]:
        """Return a sample's captions in the order of the sources, without blank ones; invalid JSON has none."""
        found: list[str] = []
        for source in self._sources:
            if source.extension in members:
                found += _texts(source, members[source.extension])
        return [text for text in map(_clean, found) if text]


def json_object(data: bytes) -> dict[str, Any]:
    """Return the object of a JSON member, or an empty one if the member holds no valid object."""
    try:
        tree = json.loads(data.decode("utf-8", "replace"))
    except (ValueError, RecursionError):  # ValueError also for numbers of more than 4,300 digits
        return {}
    return tree if isinstance(tree, dict) else {}


def _parse(name: str) -> _Source:
    extension, _, key = name.partition(":")
    if (extension == TEXT and key in ("", _LINES)) or (extension == JSON and key):
        return _Source(extension, key)
    raise UserError(f"data.captions has {name!r}; a source is txt, txt:lines or json:KEY.")


def _texts(source: _Source, data: bytes) -> list[str]:
    if source.extension == TEXT:
        text = data.decode("utf-8", "replace")
        return text.splitlines() if source.key == _LINES else [text]
    value = json_object(data).get(source.key)
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _clean(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text.replace("\0", " ").strip()[:_MAX_CHARACTERS])
