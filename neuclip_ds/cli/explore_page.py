"""The page of `neuclip-ds explore`, built with Gradio, and its server.

Result images are embedded in the page as small JPEGs. The server therefore serves no files except Gradio's own and
Gradio's copies of the query images that users drop or paste; these copies are deleted when the server stops. A
Content-Security-Policy makes browsers refuse to load resources from other hosts or submit forms to them.
"""

from __future__ import annotations

import html
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuclip_ds.data.decoders import DecodeError
from neuclip_ds.embedding.collection import Collection
from neuclip_ds.embedding.nearest import ClassScore, Match, SearchableModel
from neuclip_ds.errors import UserError
from neuclip_ds.evaluation.sets import PLACEHOLDER
from neuclip_ds.reporting.contact_sheet import data_uri

if TYPE_CHECKING:  # optional packages
    import uvicorn
    from gradio import Blocks

COUNTS = (12, 24, 48)  # choices for the number of results
_SIDE = 320  # pixels; maximum side length of a result image
_QUALITY = 85  # JPEG quality of a result image
_MOST_CLASSES = 1000
_POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; form-action 'self'; frame-ancestors 'self'"
_LOOPBACK = ("127.0.0.1", "localhost")
_MAX_UPLOAD = "50mb"
_CSS = """
.explore-grid {display: grid; grid-template-columns: repeat(auto-fill, minmax(140px, 1fr)); gap: 12px}
.explore-grid figure {margin: 0; overflow-wrap: anywhere}
.explore-grid img {width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--background-fill-secondary)}
.explore-grid figcaption, .explore-list {color: var(--body-text-color); font-size: 14px; line-height: 1.4}
.explore-list {padding-left: 0; list-style: none; overflow-wrap: anywhere}
.explore-list li {padding: 4px 0; border-top: 1px solid var(--border-color-primary)}
.explore-caption {display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 4; overflow: hidden}
.explore-name {font-size: 12px; opacity: 0.7}
.explore-score {font-variant-numeric: tabular-nums; font-weight: 600; margin-right: 6px}
.explore-bar {display: block; height: 4px; background: var(--color-accent)}
.explore-model {font-size: 16px; font-weight: 600; overflow-wrap: anywhere}
"""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Callable[[], Awaitable[Message]], Send], Awaitable[None]]


def matches_html(model: str, images: Sequence[Match], captions: Sequence[Match], collection: Collection) -> str:
    """Return the nearest images with their captions, and the nearest captions, as HTML under the model's name."""
    parts = [_heading(model), '<div class="explore-grid">']
    for match in images:
        parts.append(_figure(match, collection))
    parts.append("</div>")
    if captions:
        parts.append('<h4>Nearest captions</h4><ol class="explore-list explore-captions">')
        for match in captions:
            caption = _caption(match.index, collection)
            parts.append(f"<li>{_score(match.similarity)}{_text(caption)} {_name(match.index, collection)}</li>")
        parts.append("</ol>")
    return "".join(parts)


def scores_html(model: str, scores: Sequence[ClassScore]) -> str:
    """Return classes with their probabilities and similarities as HTML under the model's name."""
    parts = [_heading(model), '<ol class="explore-list explore-classes">']
    for score in scores:
        probability = f'<span class="explore-score">{score.probability:.1%}</span>'
        similarity = f'<span class="explore-name">cosine {score.similarity:.3f}</span>'
        bar = f'<span class="explore-bar" style="width: {score.probability:.1%}"></span>'
        parts.append(f"<li>{probability}{_text(score.name)} {similarity}{bar}</li>")
    parts.append("</ol>")
    return "".join(parts)


def _heading(model: str) -> str:
    return f'<div class="explore-model">{_text(model)}</div>'


def _figure(match: Match, collection: Collection) -> str:
    """Return the HTML of an image with its similarity, caption and name, or with the error if it cannot be read."""
    try:
        sample = collection.read(match.index)
        caption = sample.caption or ""
        picture = f'<img src="{data_uri(sample.image, _SIDE, _QUALITY)}" alt="{_text(caption)}" loading="lazy">'
    except (OSError, DecodeError) as error:
        caption = ""
        picture = f"<em>The image cannot be read: {_text(str(error))}</em>"
    described = (
        f'<span class="explore-caption" title="{_text(caption)}">{_score(match.similarity)}{_text(caption)}</span>'
    )
    return f"<figure>{picture}<figcaption>{described}{_name(match.index, collection)}</figcaption></figure>"


def _caption(index: int, collection: Collection) -> str:
    try:
        return collection.read(index).caption or ""
    except OSError as error:
        return f"(the caption cannot be read: {error})"


def _score(similarity: float) -> str:
    return f'<span class="explore-score">{similarity:.3f}</span>'


def _name(index: int, collection: Collection) -> str:
    return f'<span class="explore-name">{_text(collection.name(index))}</span>'


def _text(text: str) -> str:
    """Escape text for HTML, even within quotes; replace lone surrogates, which names of files may contain."""
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def class_names(text: str) -> list[str]:
    """Return the distinct names in a text with one name per line, or with a single line of comma-separated names."""
    lines = text.strip().splitlines()
    names = lines if len(lines) > 1 else text.split(",")
    stripped = [name.strip() for name in names]
    return list(dict.fromkeys(name for name in stripped if name))


def build_page(models: Sequence[SearchableModel], collection: Collection, source: str) -> Blocks:
    """Return the page for one or two models; `source` names the images."""
    import gradio

    def fail(message: str) -> Exception:
        return gradio.Error(message, print_exception=False)

    def search(text: str | None, image: str | None, count: int) -> list[str]:
        """Return each model's results as HTML, for the image at the path `image` if given, otherwise for `text`."""
        results = []
        for model in models:
            try:
                if image:
                    query = model.encode_image(Path(image).read_bytes())
                elif text and text.strip():
                    query = model.encode_text(text.strip())
                else:
                    raise fail("Type a text or drop an image.")
            except DecodeError as error:
                raise fail(f"The image cannot be used: {error}.") from error
            nearest_images = model.features.images.nearest(query, count)
            nearest_captions = model.features.captions.nearest(query, count)
            results.append(matches_html(model.name, nearest_images, nearest_captions, collection))
        return results

    def search_text(text: str, count: int) -> list[Any]:
        return [None, *search(text, None, count)]

    def search_image(image: str | None, count: int) -> list[str]:
        return ["", *search(None, image, count)]

    def classify(image: str | None, names_text: str, template: str) -> list[str]:
        names = class_names(names_text)
        if not image:
            raise fail("Drop an image to classify.")
        if not 2 <= len(names) <= _MOST_CLASSES:
            raise fail(f"Type 2 to {_MOST_CLASSES:,} class names, one per line.")
        if PLACEHOLDER not in template:
            raise fail(f"The prompt needs {PLACEHOLDER}, which stands for the class name.")
        data = Path(image).read_bytes()
        try:
            return [scores_html(model.name, model.classify(data, names, template)) for model in models]
        except DecodeError as error:
            raise fail(f"The image cannot be used: {error}.") from error

    def image_input(label: str) -> Any:
        # with a mode, Gradio would convert some images, and encode them again
        image = gradio.Image(label=label, type="filepath", image_mode=None, sources=["upload", "clipboard"], height=240)
        image.async_move_resource_to_block_cache = _refuse_urls(image.async_move_resource_to_block_cache)
        return image

    def outputs() -> list[Any]:
        columns = []
        with gradio.Row():
            for model in models:
                with gradio.Column(min_width=300):
                    columns.append(gradio.HTML(_heading(model.name)))
        return columns

    one_at_a_time = {"concurrency_id": "models", "concurrency_limit": 1, "api_visibility": "private"}
    with gradio.Blocks(title="neuclip-ds explore", analytics_enabled=False) as page:
        described = f"{len(models[0].features.images.index):,} images of {source}, ranked by cosine similarity."
        gradio.HTML(f"<h2>neuclip-ds explore</h2>{_text(described)}")
        with gradio.Tab("Search"):
            with gradio.Row():
                with gradio.Column(min_width=300):
                    text = gradio.Textbox(label="Text", placeholder="a photo of a dog", submit_btn="Search")
                    count = gradio.Radio(list(COUNTS), value=COUNTS[0], label="Number of results")
                with gradio.Column(min_width=300):
                    image = image_input("Or an image")
            results = outputs()
            text.submit(search_text, [text, count], [image, *results], **one_at_a_time)
            image.upload(search_image, [image, count], [text, *results], **one_at_a_time)
            count.input(search, [text, image, count], results, **one_at_a_time)
        with gradio.Tab("Classify"):
            with gradio.Row():
                with gradio.Column(min_width=300):
                    classified = image_input("Image")
                with gradio.Column(min_width=300):
                    names = gradio.Textbox(label="Class names, one per line", lines=5, placeholder="cat\ndog")
                    template = gradio.Textbox(label="Prompt", value=f"a photo of a {PLACEHOLDER}.")
                    button = gradio.Button("Classify", variant="primary")
            scores = outputs()
            button.click(classify, [classified, names, template], scores, **one_at_a_time)
    return page


def _refuse_urls(move: Callable[..., Awaitable[str | None]]) -> Callable[..., Awaitable[str | None]]:
    """Return a function that moves a query image as `move` does, but does not download images."""

    async def move_file(path: str | None) -> str | None:
        if path is not None and "://" in path:
            raise ValueError("The image must be a file, not a URL.")
        return await move(path)

    return move_file


@contextmanager
def gradio_settings() -> Iterator[None]:
    """Turn off Gradio's analytics, and delete query images after the block; Gradio must be imported in the block."""
    with tempfile.TemporaryDirectory(prefix="neuclip_ds_explore-") as folder:
        os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        os.environ["GRADIO_TEMP_DIR"] = folder
        yield


def open_port(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port; raise UserError if the port cannot be opened."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise UserError(f"{host}:{port} cannot be opened ({error}): choose another --port or --host.") from error


def make_app(page: Blocks, host: str) -> AsgiApp:
    """Return the app that serves the page.

    If `host` is localhost or 127.0.0.1, the app answers only requests to these names, which prevents DNS rebinding.
    """
    import gradio
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    if host in _LOOPBACK:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(_LOOPBACK))
    theme = gradio.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
    gradio.mount_gradio_app(
        app,
        page,
        path="/",
        app_kwargs={"openapi_url": None},
        theme=theme,
        css=_CSS,
        footer_links=[],
        run_history=False,
        ssr_mode=False,
        mcp_server=False,
        enable_monitoring=False,
        max_file_size=_MAX_UPLOAD,
    )
    return _with_policy(app)


def _with_policy(app: AsgiApp) -> AsgiApp:
    """Return an app that adds the Content-Security-Policy to all responses of `app`."""

    async def respond(scope: Scope, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"content-security-policy", _POLICY.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_with_policy)

    return respond


def make_server(page: Blocks, host: str) -> uvicorn.Server:
    """Return a server for the page; the server runs until a signal stops the program."""
    import uvicorn

    return uvicorn.Server(uvicorn.Config(make_app(page, host), log_level="warning", timeout_graceful_shutdown=1))
