"""Extract a sample's captions from its members and its JSON; if there are several, training draws one.

`data.captions` lists sources: `txt` is the whole text member, `txt:lines` each of its lines, `json:KEY` the string or
list of strings under a key of the JSON member (where recaptioned data sets keep them).
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from neuclip_ds.errors import UserError

TEXT, JSON = "txt", "json"
_LINES = "lines"


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
        return [text for text in (text.strip() for text in found) if text]


def _parse(name: str) -> _Source:
    extension, _, key = name.partition(":")
    if (extension == TEXT and key in ("", _LINES)) or (extension == JSON and key):
        return _Source(extension, key)
    raise UserError(f"data.captions has {name!r}; a source is txt, txt:lines or json:KEY.")


def _texts(source: _Source, data: bytes) -> list[str]:
    text = data.decode("utf-8", "replace")
    if source.extension == TEXT:
        return text.splitlines() if source.key == _LINES else [text]
    try:
        tree = json.loads(text)
    except ValueError:
        return []
    value = tree.get(source.key) if isinstance(tree, dict) else None
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]
