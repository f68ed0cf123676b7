"""Replace secrets of remote stores in text that is printed or stored."""

import os
import re

_RULES = (
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)[^/\s'\"@]+@"), r"\1***@"),  # USER:PASSWORD
    (re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://[^\s'\"?]*\?)[^\s'\"]+"), r"\1***"),  # a signature may have any name
    (re.compile(r"(?i)\b(authorization:\s*(?:\w+\s+)?)[^\s'\"*]+"), r"\1***"),
    (re.compile(r"(?i)\b((?:password|passwd|secret|token|api[_-]?key)=)[^\s'\"&;*]+"), r"\1***"),
)
_VARIABLE = re.compile(r"(?i)(SECRET|TOKEN|PASSWORD|SECRET_ACCESS_KEY|API_KEY)$")
_SHORTEST = 8  # characters of a variable's value; shorter ones may stand in any text


def redact(text: str) -> str:
    """Return text with `***` for passwords and queries of URLs, and for values of variables such as AWS_SECRET_..."""
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    for name, value in os.environ.items():
        if len(value) >= _SHORTEST and value in text and _VARIABLE.search(name):
            text = text.replace(value, "***")
    return text
