"""Files and URLs of images that are made to do harm: each ends in one sentence that tells nothing of the server, and nothing else stops."""

from __future__ import annotations

import http.server
import io
import os
import re
import signal
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import anyio
import numpy as np
import psutil
import pytest
import trustme
from image_models import Reference, as_file, chat_of, picture
from PIL import Image

from aengine import AsyncEngine, InvalidRequestError, SamplingParams
from aengine.api.request import RemoteImage
from aengine.images.decoder import ImageDecoder, ImageError
from aengine.server.core import image_urls
from aengine.server.core.image_urls import ImageUrls, is_public

Find = Callable[[str], Reference]
SENTENCE = re.compile(r"(prompt: )?image 0 (is|has|takes) [^\n]{3,140}")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def saved(kind: str, image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def hostile_files() -> Iterator[tuple[str, bytes]]:
    whole = picture(40, 30)
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        data = as_file(whole, kind)
        for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9):
            yield f"{kind} cut at {share}", data[: int(len(data) * share)]
        rng = np.random.default_rng(len(data))
        for seed in range(16):
            broken = np.frombuffer(data, np.uint8).copy()
            broken[rng.integers(4, len(broken), 1 + seed)] ^= rng.integers(1, 256, 1 + seed).astype(np.uint8)
            yield f"{kind} with {1 + seed} broken bytes", broken.tobytes()
    for kind in ("BMP", "TIFF", "PPM", "ICO", "TGA", "PCX", "SGI", "DDS", "PDF", "EPS"):
        yield kind, saved(kind, Image.new("RGB", (32, 32)))
    for name in (
        b"",
        b"hello",
        b"\x00" * 64,
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"\xff\xd8",
        b"GIF89a",
        b"RIFF\xff\xff\xff\xffWEBP",
    ):
        yield repr(name[:12]), name
    for name in (
        b"8BPS\0\1",
        b"SIMPLE  =",
        b"\x0e\x03\x13\x01",
        b"%!PS-Adobe",
        b"\x00\x00\x00\x0cjP  \r\n\x87\n",
        b"\x76\x2f\x31\x01",
        b"BLP2",
    ):
        yield f"another format: {name!r}", name + b"\0" * 256
    for width, height in (
        (0, 5),
        (5, 0),
        (16_385, 1),
        (1, 16_385),
        (10_000, 10_000),
        (16_384, 16_384),
        (2**31 - 1, 2**31 - 1),
        (100_000, 2),
    ):
        yield f"a PNG of {width} by {height}", png(width, height, chunk(b"IDAT", zlib.compress(b"\0" * 64)))
    for size in (1 << 20, 1 << 26):
        yield f"text that unpacks to {size}", png(4, 4, chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * size)), chunk(b"IDAT", b"broken"))
        yield f"a profile that unpacks to {size}", png(4, 4, chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x" * size)))
    yield "a length that lies", b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 2**31 - 1) + b"IHDR" + b"\0" * 32
    for depth, color in ((3, 2), (16, 3), (1, 6), (255, 255)):
        yield f"depth {depth}, color {color}", png(4, 4, chunk(b"IDAT", zlib.compress(b"\0" * 64)), depth=depth, color=color)
    yield "data for fewer rows", png(3000, 3000, chunk(b"IDAT", zlib.compress(b"\0" * 100)))
    jpeg = bytearray(as_file(whole, "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = struct.pack(">HH", 65_535, 65_535)
    yield "a JPEG of 65535 by 65535", bytes(jpeg)
    gif = bytearray(as_file(whole, "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    yield "a GIF of 65535 by 65535", bytes(gif)
    yield "more bytes than a file may have", b"\x89PNG\r\n\x1a\n" + b"\0" * (20 << 20)


FILES = dict(hostile_files())


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_files(reference: Find, anyio_backend: str) -> None:
    """What is not refused was an image after all. A stream goes on meanwhile, and memory does not grow with what a file claims."""
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096, "kv_cache_memory": "64MiB", "max_num_seqs": 4}
    few = SamplingParams(max_tokens=1, temperature=0.0)
    assert len(FILES) >= 130
    async with AsyncEngine(str(reference("qwen3_vl").folder), **sizes) as engine:
        await engine.generate(chat_of([0], [as_file(picture(40, 30))]), few)
        before = psutil.Process().memory_info().rss
        stream = engine.stream("a bystander", SamplingParams(max_tokens=3000, temperature=1.0, seed=1, ignore_eos=True))
        num_refused = 0
        for name, data in FILES.items():
            said = ""
            try:
                await engine.generate(chat_of([0], [data]), few)
            except InvalidRequestError as error:
                said = str(error)
            if said:
                num_refused += 1
                assert SENTENCE.fullmatch(said), (name, said)
                assert "0x" not in said
        assert num_refused >= 80
        assert psutil.Process().memory_info().rss - before < 300 << 20
        tokens = [await anext(stream) for _ in range(10)]
        assert len(tokens) == 10
        await stream.aclose()


def test_a_process_that_dies_or_hangs() -> None:
    decoder = ImageDecoder(seconds=0.5)
    good = as_file(picture(5, 3))
    assert decoder.decode(good).shape == (3, 5, 3)
    process = decoder._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert decoder.decode(good).shape == (3, 5, 3), "another process serves the next file"
    process = decoder._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ImageError, match=r"takes more than 0\.5 seconds to decode"):
        decoder.decode(good)
    assert decoder.decode(good).shape == (3, 5, 3)
    decoder.close()
    assert process.poll() is not None


def test_pictures_are_as_they_are_looked_at() -> None:
    """Turned as EXIF says, alpha over white, and any mode."""
    decoder = ImageDecoder()
    pixels = picture(6, 4)
    turned = Image.Exif()
    turned[0x0112] = 6
    found = decoder.decode(saved("PNG", Image.fromarray(pixels), exif=turned))
    assert (found == np.rot90(pixels, 3)).all()
    clear = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    assert (decoder.decode(saved("PNG", clear)) == 255).all()
    palette = Image.new("P", (4, 4), 3)
    palette.putpalette([0, 0, 0, 9, 9, 9, 5, 5, 5, 7, 8, 9] + [0] * 756)
    assert (decoder.decode(saved("GIF", palette)) == [7, 8, 9]).all()
    for image in (Image.new("L", (4, 4), 7), Image.new("1", (4, 4), 1), Image.new("LA", (4, 4), (7, 255)), Image.new("I;16", (4, 4), 70)):
        assert decoder.decode(saved("PNG", image)).shape == (4, 4, 3)
    assert decoder.decode(saved("JPEG", Image.new("CMYK", (4, 4)))).shape == (4, 4, 3)
    frames = [Image.new("RGB", (4, 4), (shade, 0, 0)) for shade in (10, 200)]
    first = decoder.decode(saved("GIF", frames[0], save_all=True, append_images=frames[1:]))
    assert (first == [10, 0, 0]).all()
    decoder.close()


# ---- URLs ---------------------------------------------------------------------------------------------------------------

PRIVATE = [
    "127.0.0.1",
    "127.1.2.3",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a00:1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
]
STRANGE = [
    *(
        "http://localhost/a.png",
        "ftp://localhost/a",
        "file:///etc/passwd",
        "gopher://localhost/",
        "HTTPS://localhost/a",
        "https:/localhost/a",
    ),
    *("https://", "https:///a", "https://user@localhost/a", "https://user:pw@localhost/a", "https://localhost\\@evil.example/a"),
    *(
        "https://localhost%2eevil.example/a",
        "https://local host/a",
        "https://localhost/a b",
        "https://localhost/\u00e4",
        "https://lo\u0441alhost/a",
    ),
    *(
        "https://localhost:0/a",
        "https://localhost:99999/a",
        "https://localhost:x/a",
        "https://[::1]/a",
        "https://localhost/a\\b",
        "https://-a/",
    ),
    *(
        "https://localhost\n/a",
        "https://localhost/a\r\nHost: evil.example",
        "//localhost/a",
        "localhost/a",
        "https://localhost?a",
        "https://localhost#a",
    ),
]
OTHERS = [
    "https://evil.example/a",
    "https://localhost.evil.example/a",
    "https://127.0.0.1/a",
    "https://169.254.169.254/latest",
    "https://0/",
]


def test_addresses() -> None:
    assert [address for address in PRIVATE if is_public(address)] == []
    assert all(map(is_public, ("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808")))


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, _, rest = self.path[1:].partition("/")
        length = None
        match name:
            case "good":
                status, headers, body = 200, {}, as_file(picture(5, 3))
            case "to":
                status, headers, body = 302, {"Location": rest if "://" in rest else f"/{rest}"}, b""
            case "status":
                status, headers, body = int(rest), {}, b""
            case "packed":
                status, headers, body = 200, {"Content-Encoding": "gzip"}, b"x"
            case "large":
                status, headers, body = 200, {}, b"x" * (1 << 20)
                length = 1 << 40
            case "cut":
                status, headers, body = 200, {}, b"x"
                length = 100
            case _:
                status, headers, body = 200, {}, b"text"
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        try:
            for _ in range(40 if name == "large" else 1):
                self.wfile.write(body)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[str, ssl.SSLContext]]:
    """The address of a server, and a context that trusts it."""
    authority = trustme.CA()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    inside, outside = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(inside)
    authority.configure_trust(outside)
    server.socket = inside.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"https://localhost:{server.server_address[1]}/", outside
    server.shutdown()
    server.server_close()


async def fetch(urls: ImageUrls, url: str) -> Any:
    (found,) = await urls.fetched([RemoteImage(url)])
    return found


@pytest.mark.anyio
async def test_urls(host: tuple[str, ssl.SSLContext]) -> None:
    begin, context = host
    urls = ImageUrls([begin], context, is_public=lambda address: True)
    assert (await fetch(urls, f"{begin}good"))[:4] == b"\x89PNG"
    assert (await fetch(urls, f"{begin}to/good"))[:4] == b"\x89PNG"
    assert (await fetch(urls, f"{begin}to/to/to/good"))[:4] == b"\x89PNG"
    chat = [{"role": "user", "content": [{"type": "image", "image": RemoteImage(f"{begin}good")}, {"type": "text", "text": "a"}]}]
    (message,) = await urls.resolved(chat)
    assert message["content"][0]["image"][:4] == b"\x89PNG"
    assert message["content"][1] == {"type": "text", "text": "a"}
    refused = {
        **dict.fromkeys(STRANGE, "in ASCII"),
        **dict.fromkeys(OTHERS, "none of the hosts"),
        f"{begin}to/to/to/to/to/good": "more than 3 redirects",
        f"{begin}to/https://evil.example/a": "none of the hosts",
        f"{begin}to/http://localhost/a": "in ASCII",
        f"{begin}to/https://[::ffff:7f00:1]/a": "in ASCII",
        f"{begin}status/404": "with status 404",
        f"{begin}status/500": "with status 500",
        f"{begin}packed": "an encoding that was not asked for",
        f"{begin}large": "more than 20971520 bytes",
        "https://localhost:1/a": "none of the hosts",
    }
    for url, said in refused.items():
        with pytest.raises(InvalidRequestError) as caught:
            await fetch(urls, url)
        assert SENTENCE.match(str(caught.value)), url
        assert said in str(caught.value), (url, str(caught.value))


@pytest.mark.anyio
async def test_a_host_that_is_not_on_the_internet(host: tuple[str, ssl.SSLContext]) -> None:
    """Whatever its name resolves to, and if only one of several addresses is private."""
    begin, context = host
    urls = ImageUrls([begin, "https://images.example/"], context)
    with pytest.raises(InvalidRequestError, match="localhost, which is not on the internet"):
        await fetch(urls, f"{begin}good")
    for address in PRIVATE:
        found = [(0, 0, 0, "", ("8.8.8.8", 443)), (0, 0, 0, "", (address, 443))]
        with mock.patch("socket.getaddrinfo", lambda *_, found=found, **__: found), pytest.raises(InvalidRequestError, match="not on the"):
            await fetch(urls, "https://images.example/a")


@pytest.mark.anyio
async def test_servers_that_are_slow_or_not_there(host: tuple[str, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch) -> None:
    begin, context = host
    monkeypatch.setattr(image_urls, "SECONDS", 0.3)
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as silent:
        port = silent.extra(anyio.abc.SocketAttribute.local_port)
        urls = ImageUrls([begin, f"https://localhost:{port}/", "https://localhost:1/"], context, is_public=lambda address: True)
        with pytest.raises(InvalidRequestError, match=r"does not answer within 0\.3 seconds"):
            await fetch(urls, f"https://localhost:{port}/a")
    for url in ("https://localhost:1/a", f"{begin}cut"):
        found: Sequence[str] = ("cannot be fetched from localhost",)
        with pytest.raises(InvalidRequestError, match=found[0]):
            await fetch(urls, url)
    with pytest.raises(InvalidRequestError, match="cannot be fetched"):
        await fetch(ImageUrls([begin], is_public=lambda address: True), f"{begin}good")  # whose certificate nobody trusts


def test_which_urls_a_server_may_be_told_of() -> None:
    for url in ("http://a/", "a", "https://*/", "https://a@b/"):
        with pytest.raises(ValueError, match="each is https://host/"):
            ImageUrls([url])
    ImageUrls(["https://a", "https://a:8443/path/"])
