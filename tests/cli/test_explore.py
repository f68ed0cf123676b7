"""Test the page of `neuclip-ds explore`: its HTML, what its server serves, and its use in a headless browser."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from embedded_shards import DIM, ENCODERS, SIDE, encode_captions, members, write, write_samples
from miniatures import save_clip
from PIL import Image
from safetensors.torch import load_file, save_file
from tars import jpeg, tokenize, write_pairs
from torch import Tensor
from torch.nn.functional import normalize

from neuclip_ds.cli.explore import open_models
from neuclip_ds.cli.explore_page import (
    build_page,
    class_names,
    gradio_settings,
    make_server,
    matches_html,
    open_port,
    scores_html,
)
from neuclip_ds.cli.main import main
from neuclip_ds.data.loader import LoaderOptions
from neuclip_ds.embedding.collection import FolderImages
from neuclip_ds.embedding.encoders import FeatureEncoders
from neuclip_ds.embedding.nearest import ClassScore, Match, SearchableModel, encode_collection
from neuclip_ds.errors import UserError
from neuclip_ds.models.pretrained.base import Preprocessing

CHROMIUM = Path("/usr/bin/chromium")
HOST = "127.0.0.1"
COLORS = ["red", "lime", "blue"]
CAPTION = 'A <b>red</b> "square" & more ${1 + 1} {{ value }} <script>document.title = "attacked"</script>'
IMAGES = 5


def options(**changes: Any) -> SimpleNamespace:
    defaults = {"features": None, "captions": None, "batch_size": 2, "workers": 0}
    return SimpleNamespace(**{**defaults, **changes})


def encode_color(pixels: Tensor) -> Tensor:
    """Return features that depend on the mean color alone."""
    return normalize(torch.nn.functional.pad(pixels.float().mean(dim=(2, 3)), (0, DIM - 3)), dim=1)


def encode_color_words(tokens: Tensor) -> Tensor:
    """Return the feature of the color that a text names, or of another text."""
    rows = []
    for row in tokens:
        named = [name for name in COLORS if torch.equal(row, tokenize([name])[0])]
        rows.append(torch.eye(DIM)[COLORS.index(named[0])] if named else encode_captions(row[None])[0])
    return torch.stack(rows)


def colors_model(name: str, collection: FolderImages, order: int) -> SearchableModel:
    """Return a model that knows colors; with an `order` of -1, it takes each color for its opposite."""
    mean = (0.5, 0.5, 0.5)
    encoders = FeatureEncoders(
        name=name,
        output="joint",
        image=lambda pixels: order * encode_color(pixels),
        preprocessing=Preprocessing(size=SIDE, mean=mean, std=mean),
        text=encode_color_words,
        tokenize=ENCODERS.tokenize,
    )
    features = encode_collection(collection, encoders, LoaderOptions(workers=0), 4, lambda *counts: None)
    return SearchableModel(name, encoders, 0.1, features)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a red, a lime and a blue picture and two gray ones; only the red one has a caption."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, color in zip("abcde", [*COLORS, "gray", "silver"], strict=True):
        Image.new("RGB", (20, 20), color).save(folder / f"{name}.png")
    (folder / "a.txt").write_text(CAPTION)
    return folder


class Served:
    """A running page of two models, and the addresses to which this process has tried to connect."""

    def __init__(self, url: str, connections: list[Any]) -> None:
        self.url = url
        self.connections = connections

    def get(self, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read(), dict(response.headers.items())
        except urllib.error.HTTPError as error:
            return error.code, error.read(), dict(error.headers.items())


@pytest.fixture(scope="module")
def served(pictures: Path) -> Iterator[Served]:
    """Serve the page while the network is blocked, except for this machine."""
    for package in ("gradio", "usearch"):
        pytest.importorskip(package, reason="neuclip-ds explore needs pip install 'neuclip_ds[explore]'")
    blocked: list[Any] = []
    connect = socket.socket.connect
    look_up = socket.getaddrinfo

    def connect_here(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and address[0] not in (HOST, "::1", "localhost"):
            blocked.append(address)
            raise OSError(f"{address} is blocked")
        connect(self, address)

    def look_up_here(host: Any, *arguments: Any, **named: Any) -> Any:
        if host not in (HOST, "::1", "localhost", None):
            blocked.append(host)
            raise socket.gaierror(f"{host} is blocked")
        return look_up(host, *arguments, **named)

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(socket.socket, "connect", connect_here)
        patch.setattr(socket, "getaddrinfo", look_up_here)
        for name in ("GRADIO_ANALYTICS_ENABLED", "GRADIO_TEMP_DIR", "HF_HUB_DISABLE_TELEMETRY"):
            patch.setenv(name, "")  # restored afterwards
        stack.enter_context(gradio_settings())
        listener = stack.enter_context(open_port(HOST, 0))
        collection = FolderImages(pictures, ["txt"])
        models = [colors_model("runs/first", collection, 1), colors_model("runs/<second>", collection, -1)]
        server = make_server(build_page(models, collection, str(pictures)), HOST)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.05)
        yield Served(f"http://{HOST}:{listener.getsockname()[1]}", blocked)
        server.should_exit = True
        thread.join()


def test_captions_names_and_models_are_escaped(pictures: Path) -> None:
    collection = FolderImages(pictures, ["txt"])
    text = matches_html("<model>", [Match(index=0, similarity=0.25)], [Match(index=0, similarity=0.5)], collection)
    text += scores_html("m", [ClassScore(name="<i>", similarity=0.25, probability=1)])
    for forbidden in ("<model>", "<b>", "<script", "<i>"):
        assert forbidden not in text
    for expected in ("&lt;model&gt;", "0.250", "0.500", "a.png", "data:image/jpeg;base64,", "100.0%"):
        assert expected in text


def test_an_image_that_can_no_longer_be_read_is_reported_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg(0))
    collection = FolderImages(tmp_path, ["txt"])
    (tmp_path / "a.jpg").unlink()
    match = Match(index=0, similarity=0.25)
    assert "cannot be read" in matches_html("m", [match], [match], collection)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("cat\n dog \n\ncat\n", ["cat", "dog"]),
        ("cat, dog,,bird", ["cat", "dog", "bird"]),
        ("a cat, sleeping\na dog", ["a cat, sleeping", "a dog"]),
        (" \n", []),
    ],
)
def test_class_names_are_separated_by_lines_or_commas(text: str, names: list[str]) -> None:
    assert class_names(text) == names


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a/b", "c/d", "e/f", "--images=."], "3 models are given, but the page shows at most two"),
        (["a/b", "c/d", "--images=.", "--features", "."], "1 folder for 2 models"),
        (["a/b", "--images=.", "--features", "memory://a"], "memory://a is remote: copy"),
        (["a/b", "--images=.", "--features", ".", "--captions", "txt"], "--captions has no effect with --features"),
    ],
)
def test_mistakes_are_reported(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explore", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_reported() -> None:
    with open_port(HOST, 0) as listener, pytest.raises(UserError, match="choose another --port"):
        open_port(HOST, listener.getsockname()[1])


def test_models_are_opened_with_features_of_a_folder_or_shards(pictures: Path, tmp_path: Path) -> None:
    save_clip(tmp_path / "model")
    models, collection = open_models(options(models=[str(tmp_path / "model")], images=str(pictures)))
    assert len(models[0].features.images.index) == len(collection) == IMAGES
    assert len(models[0].features.captions.index) == 1
    shards = write_pairs(tmp_path / "shards", [2, 1])
    (model,), collection = open_models(options(models=[str(tmp_path / "model")], images=str(shards)))
    assert [collection.read(index).caption for index in range(3)] == ["caption 0", "caption 1", "caption 2"]
    assert torch.allclose(
        model.encode_text("caption 1"), torch.from_numpy(model.features.captions.values[1]), atol=1e-5
    )
    image = members(1)["jpg"]
    assert torch.allclose(model.encode_image(image), torch.from_numpy(model.features.images.values[1]), atol=1e-5)


def test_features_of_embed_are_read(tmp_path: Path) -> None:
    save_clip(tmp_path / "model")
    write_pairs(tmp_path / "shards", [2, 1])
    embedded = ["embed", f"{tmp_path}/model", f"{tmp_path}/shards", f"--out={tmp_path}/out", "--dtype=float32"]
    main([*embedded, "--workers=0"])
    named = {"models": [f"{tmp_path}/model"], "images": f"{tmp_path}/shards"}
    (stored,), _ = open_models(options(**named, features=[f"{tmp_path}/out"]))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "part").symlink_to(tmp_path / "shards")
    (computed,), _ = open_models(options(models=named["models"], images=f"{tmp_path}/linked"))
    assert np.allclose(stored.features.images.values, computed.features.images.values, atol=1e-5)
    assert np.allclose(stored.features.captions.values, computed.features.captions.values, atol=1e-5)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["visual_projection.weight"] = weights["visual_projection.weight"].flip(0)
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="has changed since"):
        open_models(options(**named, features=[f"{tmp_path}/out"]))


def test_a_folder_of_image_files_has_no_stored_features(pictures: Path, tmp_path: Path) -> None:
    write(tmp_path, write_samples(tmp_path / "shards"))
    (pictures / "._hidden.tar").touch()
    with pytest.raises(UserError, match="omit --features"):
        open_models(options(models=["a/b"], images=str(pictures), features=[str(tmp_path)]))


def test_the_server_sends_no_file_and_answers_only_this_machine(served: Served, pictures: Path) -> None:
    status, _, headers = served.get("/")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    for path in (pictures / "a.png", pictures / "a.txt", Path(__file__), Path("/etc/hostname")):
        for prefix in ("/gradio_api/file=", "/file=", "/static/", "/gradio_api/file=../../.."):
            assert served.get(f"{prefix}{path}")[0] in (403, 404)
    assert served.get("/", Host="attacker.example")[0] == 400
    assert served.get("/openapi.json")[0] == 404


def test_the_server_does_not_download_images(served: Served) -> None:
    config = json.loads(served.get("/config")[1])
    image = {"path": "http://attacker.example/a.png", "meta": {"_type": "gradio.FileData"}}
    events = {dependency["targets"][0][1]: dependency["id"] for dependency in config["dependencies"]}
    body = {"data": [image, 12], "fn_index": events["upload"], "session_hash": "abc"}
    assert served.get("/gradio_api/queue/join", body)[0] == 200
    answer = served.get("/gradio_api/queue/data?session_hash=abc")[1].decode()
    assert '"success":false' in answer
    assert served.connections == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="the browser test needs pip install playwright")
    if not CHROMIUM.is_file():
        pytest.skip(f"the browser test needs {CHROMIUM}, as Debian installs it")
    rules = f"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE {HOST}"
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", rules])
        yield browser
        browser.close()


def test_a_user_searches_and_classifies_images(served: Served, browser: Any, pictures: Path) -> None:
    page = browser.new_page(color_scheme="dark")
    requested: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(served.url)

    def names() -> list[list[str]]:
        """Return the names of the nearest images of each model, in the order on the page."""
        grids = page.locator(".explore-grid").all()
        return [grid.locator("figcaption .explore-name").all_inner_texts() for grid in grids]

    page.get_by_label("Text").fill("blue")
    page.get_by_label("Text").press("Enter")
    page.wait_for_selector(".explore-grid img")
    first, second = names()
    assert first[0] == second[-1] == "c.png" and len(first) == len(second) == IMAGES
    assert page.locator(".explore-model:visible").all_inner_texts() == ["runs/first", "runs/<second>"]
    is_loaded = "images => images.every(image => image.complete && image.naturalWidth > 0)"
    assert page.locator(".explore-grid img").evaluate_all(is_loaded)

    # an image replaces the text
    page.locator("input[type=file]").first.set_input_files(pictures / "a.png")
    page.wait_for_function("document.querySelector('.explore-grid .explore-name').innerText == 'a.png'")
    first, second = names()
    assert first[0] == "a.png"
    assert page.get_by_label("Text").input_value() == ""
    captions = page.locator(".explore-captions").first.inner_text()
    assert CAPTION in captions and "a.png" in captions

    page.get_by_role("tab", name="Classify").click()
    panel = page.get_by_role("tabpanel").filter(has=page.get_by_label("Prompt"))
    panel.locator("input[type=file]").set_input_files(pictures / "b.png")
    panel.locator("img").wait_for()
    page.get_by_label("Class names").fill("red\nlime\nblue")
    page.get_by_label("Prompt").fill("{c}")
    panel.get_by_role("button", name="Classify").click()
    page.wait_for_selector(".explore-classes")
    lists = page.locator(".explore-classes").all()
    best = [classes.locator("li").first.inner_text() for classes in lists]
    assert "lime" in best[0] and "1.000" in best[0] and "lime" not in best[1]
    page.get_by_label("Prompt").fill("no place for a name")
    panel.get_by_role("button", name="Classify").click()
    page.get_by_text("The prompt needs {c}").wait_for()

    assert page.title() == "neuclip-ds explore" and errors == []
    assert [url for url in requested if not url.startswith((served.url, "data:", "blob:"))] == []
    assert served.connections == []
