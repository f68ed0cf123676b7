"""A page that follows runs while they train, and its server."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from neuclip_ds.errors import UserError
from neuclip_ds.reporting.page import html_page
from neuclip_ds.reporting.run_report import Page

_FOLLOWED = ("metrics.jsonl", "events.jsonl", "nearest_captions.json", "log.txt", "report.html")
_LINES, _TAIL = 10, 1 << 14  # of log.txt that are shown, and bytes that are read for them
_SCRIPT = (Path(__file__).parent / "watch.js").read_text(encoding="utf-8")


class LivePage:
    """The page of runs, drawn anew when their files have changed, at most every `seconds`.

    Args:
        runs: label -> folder.
        draw: draws the page; raises `UserError` while a run has no metrics.
    """

    def __init__(self, runs: Mapping[str, Path], draw: Callable[[Mapping[str, Path]], Page], seconds: float) -> None:
        self._runs, self._draw, self._seconds = runs, draw, seconds
        self._lock, self._text, self._drawn_at = Lock(), "", -seconds
        self._state: list[int] = []

    def text(self) -> str:
        """Return the page as HTML; requests at the same time share one drawing."""
        with self._lock:
            state = [_changed(run / name) for run in self._runs.values() for name in _FOLLOWED]
            if state != self._state and time.monotonic() >= self._drawn_at + self._seconds:
                self._text, self._state = self._page(), state
                self._drawn_at = time.monotonic()
            return self._text

    def _page(self) -> str:
        status = "".join(_status(label, run) for label, run in self._runs.items())
        status += f'<p class="ahead" id="connection"></p><script>{_SCRIPT}</script>'
        try:
            return self._draw(self._runs).html(status)
        except UserError as error:
            return html_page(", ".join(self._runs), [status, f"<p>{html.escape(str(error))}</p>"])


def serve(page: LivePage, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of a page, of which the caller runs `serve_forever`; port 0 takes a free one.

    Raises:
        UserError: nothing can listen there.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = self.path == "/"
            body = (page.text() if found else "There is one page, /.").encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", f"text/{'html' if found else 'plain'}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Keep the terminal free of a line for each request."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise UserError(f"Cannot listen at {host}:{port} ({error.strerror}); choose another --port.") from error


def _status(label: str, run: Path) -> str:
    """Return how far a run is, and the end of its log."""
    lines = _last_lines(run / "log.txt")
    steps = [found for line in lines if (found := re.search(r"step (\d+)/(\d+)", line))]
    bar = f'<progress value="{steps[-1][1]}" max="{steps[-1][2]}"></progress>' if steps else ""
    text = html.escape("\n".join(lines[-_LINES:]) or f"{run} has no log.txt yet.")
    return f"<section><h2>{html.escape(label)} {bar}</h2><pre>{text}</pre></section>"


def _last_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        return file.read().decode("utf-8", "replace").splitlines()


def _changed(path: Path) -> int:
    return path.stat().st_mtime_ns if path.is_file() else 0
