"""TokenizerService over a real channel, with tokenizers of every kind, and on the demo model beside generation."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import chat_templates
import grpc
import pytest
import tiny_tokenizers
from fake_engine import INFO, FakeEngine
from grpc import aio
from grpc_harness import Serving, failure_of, serving
from hang_guard import HANG_SECONDS
from slow_cases import slow_but

import aengine
from aengine import AsyncEngine
from aengine.aio.edge import LoopEdge
from aengine.api.outputs import RenderedChat, TokenizedText
from aengine.api.request import MAX_CHAT_MESSAGES
from aengine.engine.requests import Limits
from aengine.engine.text import MAX_NAMED_IDS, Texts
from aengine.server.core import core
from aengine.server.core.core import MAX_PIECES_TEXT_BYTES, MAX_TEXT_BYTES, MAX_TOKEN_IDS
from aengine.server.grpc.services import text as service
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.v1.generation_pb2 import ChatMessage, ChatPrompt, ContentPart, GenerationSpec, LogprobOptions, OutputOptions, TokenIds
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.v1.tokenizer_service_pb2 import DetokenizeRequest, RenderChatRequest, TokenizeRequest
from aengine.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub

pytestmark = pytest.mark.anyio

DEMO = Path(aengine.__file__).parent / "models" / "demo_model"
VOCAB_SIZE = 1000  # of the fake engine
TEXTS = ["", " ", "It is a truth", "héllo 😀 漢字 naïve e\u0301", "  two spaces\nand <think> a </s> line  ", "👨‍👩‍👧‍👦"]
CONVERSATION = ChatPrompt(
    messages=[
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="How do you do? 😀"),
        ChatMessage(role="user"),
    ]
)


class TokenizingEngine(FakeEngine):
    """Made in a running loop."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.texts = Texts(tokenizer, Limits(INFO, 512, 20), LoopEdge())

    async def tokenize(self, text: str, **fields: Any) -> list[int]:
        return await self.texts.tokenize(text, **{"for_prompt": False, "literals": (), **fields})

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        return await self.texts.locate(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return await self.texts.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        return await self.texts.token_bytes(token_ids)

    async def render_chat(self, messages: Any, **fields: Any) -> RenderedChat:
        return await self.texts.render_chat(messages, None, **fields)


@asynccontextmanager
async def tokenizing(tokenizer: Any) -> AsyncIterator[Any]:
    async with serving(TokenizingEngine(tokenizer)) as serve:
        yield TokenizerServiceStub(serve.channel)


@pytest.fixture(scope="module")
async def demo() -> AsyncIterator[Serving]:
    async with AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024) as engine, serving(engine, limit=None) as serve:
        yield serve


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """Adds <bos> to every text; has a chat template."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    return load("byte_level", tmp_path, chat_template=template)


def load(kind: str, folder: Path, **config: object) -> Tokenizer:
    tiny_tokenizers.ALL[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return Tokenizer.load(folder)


async def refused(call: Any) -> dict[str, str]:
    """What the call is refused for: descriptions by field."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    failure = failure_of(caught.value)
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    return {violation.field: violation.description for detail in failure.details for violation in getattr(detail, "field_violations", ())}


@pytest.mark.parametrize("special", [True, False, None])
async def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer, special: bool | None) -> None:
    async with tokenizing(tokenizer) as stub:
        for text in TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=special is not False)
            assert ids[:1] == [0] or special is False
            whole = await stub.Tokenize(TokenizeRequest(text=text, add_special_tokens=special))
            count = await stub.Tokenize(TokenizeRequest(text=text, add_special_tokens=special, count_only=True))
            assert (list(whole.token_ids), whole.num_tokens) == (ids, len(ids))
            assert not any((whole.pieces, whole.start_offsets, whole.end_offsets))
            assert (list(count.token_ids), count.num_tokens) == ([], len(ids))


@pytest.mark.parametrize("kind", tiny_tokenizers.ALL)
async def test_pieces_stand_where_the_text_has_them(kind: str, tmp_path: Path) -> None:
    """Offsets are in bytes of UTF-8, at the borders of characters, in order, and between them they cover what the decoder gives back."""
    tokenizer = load(kind, tmp_path)
    async with tokenizing(tokenizer) as stub:
        for text in TEXTS:
            answer = await stub.Tokenize(TokenizeRequest(text=text, with_pieces=True))
            data = text.encode()
            ids, starts, ends = list(answer.token_ids), list(answer.start_offsets), list(answer.end_offsets)
            assert ids == tokenizer.encode(text)
            assert [tokenizer.piece(token_id) or piece for token_id, piece in zip(ids, answer.pieces, strict=True)] == list(answer.pieces)
            assert len(ids) == len(starts) == len(ends) == answer.num_tokens
            assert starts == sorted(starts)
            assert ends == sorted(ends)
            assert all(0 <= start <= end <= len(data) for start, end in zip(starts, ends, strict=True))
            for start, end in zip(starts, ends, strict=True):
                data[start:end].decode()  # whole characters
            covered = {place for start, end in zip(starts, ends, strict=True) for place in range(start, end)}
            assert bytes(byte for place, byte in enumerate(data) if place not in covered).strip() == b""


async def test_offsets_of_many_byte_characters_and_special_tokens(tmp_path: Path) -> None:
    async with tokenizing(load("byte_level", tmp_path)) as stub:
        answer = await stub.Tokenize(TokenizeRequest(text="Zñ😀<think>b", with_pieces=True))
        assert list(zip(answer.pieces, answer.start_offsets, answer.end_offsets, strict=True)) == [
            *(("<bos>", 0, 0), ("Z", 0, 1), *((half, 1, 3) for half in "Ã±"), *((quarter, 3, 7) for quarter in "ðŁĺĢ")),
            *(("<think>", 7, 14), ("b", 14, 15)),
        ]
    async with tokenizing(load("wordpiece", tmp_path)) as stub:
        answer = await stub.Tokenize(TokenizeRequest(text="é truth [SEP]  ", with_pieces=True))
        places = list(zip(answer.pieces, answer.start_offsets, answer.end_offsets, strict=True))
        assert (places[0], places[-3:]) == (("[CLS]", 0, 0), [("truth", 3, 8), ("[SEP]", 9, 14), ("[SEP]", 14, 14)])


async def test_a_tokenizer_without_offsets_refuses_pieces_alone(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    async with tokenizing(Tokenizer.load(tmp_path)) as stub:
        violations = await refused(stub.Tokenize(TokenizeRequest(text="a", with_pieces=True)))
        assert violations == {"with_pieces": "this model's tokenizer does not tell where its tokens are in the text"}
        assert (await stub.Tokenize(TokenizeRequest(text="aé"))).num_tokens == 4
        assert (await stub.Tokenize(TokenizeRequest(text="aé", count_only=True))).num_tokens == 4


async def test_text_of_ids(tokenizer: Tokenizer) -> None:
    async with tokenizing(tokenizer) as stub:
        for text in TEXTS:
            ids = tokenizer.encode(text)
            assert (await stub.Detokenize(DetokenizeRequest(token_ids=ids))).text == text
            assert (await stub.Detokenize(DetokenizeRequest(token_ids=ids, skip_special_tokens=False))).text == "<bos>" + text
        half = tokenizer.encode("😀", add_special_tokens=False)[:2]
        assert (await stub.Detokenize(DetokenizeRequest(token_ids=half))).text == "\ufffd"
        long = tokenizer.encode("It is a truth 😀 " * 1000)
        assert (await stub.Detokenize(DetokenizeRequest(token_ids=long))).text == "It is a truth 😀 " * 1000
        shown = await stub.Detokenize(DetokenizeRequest(token_ids=long, skip_special_tokens=False))
        assert shown.text == "<bos>" + "It is a truth 😀 " * 1000


async def test_a_conversation_with_and_without_the_opening(tokenizer: Tokenizer) -> None:
    async with tokenizing(tokenizer) as stub:
        for opened, text in (
            (None, "[system]Be brief.[user]How do you do? 😀[user]>"),
            (False, "[system]Be brief.[user]How do you do? 😀[user]"),
        ):
            answer = await stub.RenderChat(RenderChatRequest(chat=CONVERSATION, add_generation_prompt=opened))
            assert answer.text == text
            assert list(answer.token_ids) == tokenizer.encode(text, add_special_tokens=False)


async def test_the_template_is_given_all_of_a_chat(tmp_path: Path) -> None:
    tokenizer = load("byte_level", tmp_path, chat_template=chat_templates.QWEN3)
    call = {"function": {"name": "f", "arguments": {"b": 1, "a": "ü"}}}
    said = [
        ChatMessage(role="user", parts=[ContentPart(text="a"), ContentPart(text="b")]),
        ChatMessage(role="assistant", extra_fields=json.dumps({"content": None, "tool_calls": [call]})),
        ChatMessage(role="tool", content="2"),
    ]
    chat = ChatPrompt(messages=said, tools=['{"name": "f"}'], template_kwargs='{"enable_thinking": false}')
    same = [{"role": "user", "content": "ab"}, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2"}]
    async with tokenizing(tokenizer) as stub:
        text = (await stub.RenderChat(RenderChatRequest(chat=chat))).text
        assert text == tokenizer.render_chat(same, tools=[{"name": "f"}], template_kwargs={"enable_thinking": False}).text
        chat.add_generation_prompt = False
        closed = (await stub.RenderChat(RenderChatRequest(chat=chat))).text
        assert text == closed + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert (await stub.RenderChat(RenderChatRequest(chat=chat, add_generation_prompt=True))).text == text
        chat.continue_final_message, chat.template_kwargs = True, '{"tools": 1}'
        assert list(await refused(stub.RenderChat(RenderChatRequest(chat=chat)))) == ["chat.template_kwargs"]
        chat.template_kwargs = ""
        assert (await stub.RenderChat(RenderChatRequest(chat=chat))).text.endswith("<tool_response>\n2")
        both = RenderChatRequest(chat=chat, add_generation_prompt=True)
        assert list(await refused(stub.RenderChat(both))) == ["chat.continue_final_message"]


async def test_a_chat_prompt_has_the_ids_that_are_rendered(demo: Serving) -> None:
    rendered = await TokenizerServiceStub(demo.channel).RenderChat(RenderChatRequest(chat=CONVERSATION))
    assert rendered.text.endswith("<|im_start|>assistant\n")
    spec = GenerationSpec(output=OutputOptions(token_ids=True, prompt_logprobs=LogprobOptions()))
    spec.sampling.temperature, spec.stopping.max_tokens = 0, 4
    spec.prompt.chat.CopyFrom(CONVERSATION)
    chat = await demo.generation.Generate(GenerateRequest(spec=spec))
    spec.prompt.token_ids.CopyFrom(TokenIds(ids=rendered.token_ids))
    plain = await demo.generation.Generate(GenerateRequest(spec=spec))
    assert chat.prompt.num_tokens == len(rendered.token_ids)
    assert chat.prompt_logprobs.ranks == plain.prompt_logprobs.ranks  # of every token of the prompt
    assert chat.sequences == plain.sequences


async def test_a_chat_prompt_has_no_more_messages_than_can_be_rendered(demo: Serving) -> None:
    spec = GenerationSpec()
    spec.prompt.chat.messages.extend([ChatMessage(role="user")] * (MAX_CHAT_MESSAGES + 1))
    assert list(await refused(demo.generation.Generate(GenerateRequest(spec=spec)))) == ["spec.prompt.chat.messages"]


async def test_a_text_prompt_has_the_ids_of_its_text(demo: Serving) -> None:
    text = "It is a truth, 漢字"
    count = await TokenizerServiceStub(demo.channel).Tokenize(TokenizeRequest(text=text, model="demo", count_only=True))
    spec = GenerationSpec()
    spec.prompt.text, spec.stopping.max_tokens = text, 1
    assert (await demo.generation.Generate(GenerateRequest(spec=spec))).prompt.num_tokens == count.num_tokens > 3


@pytest.mark.parametrize("part", slow_but([16], [1, 16]))
async def test_what_is_out_of_range_is_named(tokenizer: Tokenizer, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limits are: these, or a part of them."""
    text_bytes, pieces_bytes, num_ids = MAX_TEXT_BYTES // part, MAX_PIECES_TEXT_BYTES // part, MAX_TOKEN_IDS // part
    for module in (service, core):
        monkeypatch.setattr(module, "MAX_TEXT_BYTES", text_bytes)
    monkeypatch.setattr(core, "MAX_PIECES_TEXT_BYTES", pieces_bytes)
    monkeypatch.setattr(core, "MAX_TOKEN_IDS", num_ids)
    async with tokenizing(tokenizer) as stub:
        words = TokenizeRequest(text="a " * (text_bytes // 2), count_only=True)
        assert (await stub.Tokenize(words)).num_tokens > text_bytes / 2
        text = "é" * (text_bytes // 2) + "a"
        assert await refused(stub.Tokenize(TokenizeRequest(text=text))) == {"text": f"{text_bytes + 1} bytes are more than {text_bytes}"}
        long = TokenizeRequest(text="a" * pieces_bytes, with_pieces=True)
        assert len((await stub.Tokenize(long)).pieces) > 1
        long.text += "a"
        assert list(await refused(stub.Tokenize(long))) == ["text"]
        assert list(await refused(stub.Tokenize(TokenizeRequest(with_pieces=True, count_only=True)))) == ["with_pieces"]

        assert await refused(stub.Detokenize(DetokenizeRequest(token_ids=[5, VOCAB_SIZE - 1, VOCAB_SIZE, 6, 2**32 - 1]))) == {
            "token_ids[2]": f"{VOCAB_SIZE} is not below vocab_size {VOCAB_SIZE}",
            "token_ids[4]": f"{2**32 - 1} is not below vocab_size {VOCAB_SIZE}",
        }
        many = await refused(stub.Detokenize(DetokenizeRequest(token_ids=[VOCAB_SIZE] * 1000)))
        assert list(many) == [f"token_ids[{index}]" for index in range(MAX_NAMED_IDS)]
        ids = [5] * num_ids
        assert len((await stub.Detokenize(DetokenizeRequest(token_ids=ids))).text) == num_ids
        assert list(await refused(stub.Detokenize(DetokenizeRequest(token_ids=[*ids, 5])))) == ["token_ids"]

        assert list(await refused(stub.RenderChat(RenderChatRequest()))) == ["chat.messages"]
        nobody = ChatPrompt(messages=[ChatMessage(role="user"), ChatMessage(content="a"), ChatMessage()])
        assert list(await refused(stub.RenderChat(RenderChatRequest(chat=nobody)))) == ["chat.messages[1].role", "chat.messages[2].role"]
        crowd = ChatPrompt(messages=[ChatMessage(role="u")] * MAX_CHAT_MESSAGES)
        assert (await stub.RenderChat(RenderChatRequest(chat=crowd))).text == "[u]" * MAX_CHAT_MESSAGES + ">"
        crowd.messages.add(role="u")
        assert list(await refused(stub.RenderChat(RenderChatRequest(chat=crowd)))) == ["chat.messages"]
        long_chat = ChatPrompt(messages=[ChatMessage(role="u", content="a" * text_bytes)])
        assert list(await refused(stub.RenderChat(RenderChatRequest(chat=long_chat)))) == ["chat"]


async def test_a_template_that_refuses_and_a_model_without_one(tmp_path: Path) -> None:
    request = RenderChatRequest(chat=CONVERSATION)
    async with tokenizing(load("byte_level", tmp_path)) as stub:
        assert "this model has none" in (await refused(stub.RenderChat(request)))["chat"]
    async with tokenizing(load("byte_level", tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")) as stub:
        assert "roles must alternate" in (await refused(stub.RenderChat(request)))["chat"]


async def test_another_model_and_none_yet(tokenizer: Tokenizer) -> None:
    engine = TokenizingEngine(tokenizer)
    async with serving(engine) as serve:
        stub = TokenizerServiceStub(serve.channel)
        calls: list[Callable[[str], Any]] = [
            lambda model: stub.Tokenize(TokenizeRequest(model=model)),
            lambda model: stub.Detokenize(DetokenizeRequest(model=model)),
            lambda model: stub.RenderChat(RenderChatRequest(model=model, chat=CONVERSATION)),
        ]
        for running, model, code in ((True, "other", grpc.StatusCode.NOT_FOUND), (False, "", grpc.StatusCode.UNAVAILABLE)):
            engine.running = running
            for call in calls:
                with pytest.raises(aio.AioRpcError) as caught:
                    await call(model)
                assert caught.value.code() is code
        engine.running = True
        for call in calls:
            await call("fake")


class StuckTokenizer:
    """Encodes when it is let; tells what it was asked for."""

    def __init__(self) -> None:
        self.begun: queue.Queue[str] = queue.Queue()
        self.go_on = threading.Event()

    def encode(self, text: str, *, add_special_tokens: bool, literals: object = ()) -> list[int]:
        self.begun.put(text)
        assert self.go_on.wait(HANG_SECONDS)
        return [1, 2]


async def test_a_client_that_goes_away_leaves_nothing_and_the_loop_goes_on(engine: FakeEngine) -> None:
    """Work that waits is dropped, work that has begun ends with its step, and other calls are answered all the while."""
    stuck, others = StuckTokenizer(), set(threading.enumerate())
    async with tokenizing(stuck) as stub:
        begun = stub.Tokenize(TokenizeRequest(text="begun"))
        assert await anyio.to_thread.run_sync(stuck.begun.get) == "begun"
        waiting = [stub.Tokenize(TokenizeRequest(text=f"dropped {index}")) for index in range(5)]
        last = stub.Tokenize(TokenizeRequest(text="kept"))
        with pytest.raises(aio.AioRpcError) as caught:  # the loop answers, and by now it has seen the others
            await stub.Tokenize(TokenizeRequest(model="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        for call in (begun, *waiting):
            call.cancel()
        await asyncio.gather(begun, *waiting, return_exceptions=True)
        with pytest.raises(aio.AioRpcError):
            await stub.Tokenize(TokenizeRequest(model="other"))
        stuck.go_on.set()
        assert list((await last).token_ids) == [1, 2]
        assert stuck.begun.get_nowait() == "kept"
        assert stuck.begun.empty()
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("aengine-tokenizer-service"):
            await anyio.to_thread.run_sync(thread.join, 10)
            assert not thread.is_alive()  # it ends with the server
