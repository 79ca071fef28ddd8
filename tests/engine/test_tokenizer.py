from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny_tokenizers
import tokenizers

import aengine
from aengine import InvalidRequestError, ModelLoadError
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.tokenizer.vocabulary import text_of_tokens

DEMO = Path(aengine.__file__).parent / "models" / "demo_model"
TEXTS = [
    "",
    " ",
    "It is a truth universally acknowledged",
    "  two spaces,\n\nlines and a tab\t.",
    "emoji 😀 👨‍👩‍👧‍👦 漢字 e\u0301 נקודות",
    "special <bos> <s> </s> [SEP] <|im_end|> <|endoftext|> words",
    "don't, I'm; we've 12345",
]


@pytest.fixture
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO)


def auto(folder: Path) -> object:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def render_chat(tokenizer: Tokenizer, messages: list[dict[str, object]]) -> list[int]:
    """The ids of a conversation as a prompt: the template writes the special tokens itself."""
    return tokenizer.encode(tokenizer.render_chat(messages).text, add_special_tokens=False)


def save(kind: str, folder: Path, **config: object) -> Path:
    tiny_tokenizers.ALL[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


def assert_same(ours: Tokenizer, theirs: object) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False), text


def test_demo_model_as_in_transformers(demo: Tokenizer) -> None:
    assert demo.vocab_size == 4096
    assert_same(demo, auto(DEMO))
    assert all(demo.decode(demo.encode(text)) == text for text in TEXTS if "<|" not in text)


@pytest.mark.parametrize("kind", tiny_tokenizers.ALL)
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True, "add_eos_token": True, "legacy": True}], ids=["plain", "flags"])
def test_tiny_tokenizers_as_in_transformers(kind: str, flags: dict[str, bool], tmp_path: Path) -> None:
    """The flags change nothing where there is a tokenizer.json, here and there."""
    named = {"bos_token": "<bos>", "eos_token": "<eos>"} if kind == "byte_level" else {}
    folder = save(kind, tmp_path, clean_up_tokenization_spaces=False, **named, **flags)
    assert_same(Tokenizer.load(folder), auto(folder))


def test_a_tokenizer_without_post_processor_adds_no_bos(tmp_path: Path) -> None:
    core = tiny_tokenizers.byte_level()
    data = json.loads(core.to_str())
    data["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert 0 not in tokenizer.encode("truth")
    assert_same(tokenizer, auto(tmp_path))


def test_special_tokens_named_in_the_config_are_left_out_of_text(tmp_path: Path) -> None:
    folder = save("byte_level", tmp_path, eos_token={"__type": "AddedToken", "content": "<think>"}, pad_token="<absent>")
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("a<think>b")
    assert tokenizer.decode(ids) == "ab" == auto(folder).decode(ids, skip_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>a<think>b"
    assert tokenizer.vocab_size == tiny_tokenizers.byte_level().get_vocab_size()


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    core = tiny_tokenizers.byte_level()
    core.enable_truncation(max_length=4)
    core.enable_padding(length=64)
    core.save(str(tmp_path / "tokenizer.json"))
    plain = tiny_tokenizers.byte_level()
    assert Tokenizer.load(tmp_path).encode("It is a truth universally") == plain.encode("It is a truth universally").ids


def test_transformers_stays_out_where_there_is_a_tokenizer_json() -> None:
    code = f"""
        import sys
        from pathlib import Path
        from aengine.tokenizer.tokenizer import Tokenizer
        tokenizer = Tokenizer.load(Path({str(DEMO)!r}))
        detokenizer = tokenizer.detokenizer()
        ids = tokenizer.encode("a truth")
        assert "".join(detokenizer.push(i) for i in ids) + detokenizer.flush() == tokenizer.decode(ids) == "a truth"
        assert tokenizer.has_chat_template
        loaded = {{"torch", "transformers"}} & set(sys.modules)
        assert not loaded, loaded
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_chat_as_in_transformers(demo: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How do you do"}, {"type": "text", "text": " today?"}]},
    ]
    expected = auto(DEMO).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert render_chat(demo, messages) == expected
    assert expected[-3:] == demo.encode("<|im_start|>assistant\n")


def test_chat_has_one_bos(tmp_path: Path) -> None:
    """The template writes BOS and the post-processor would too."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    tokenizer = Tokenizer.load(save("byte_level", tmp_path, bos_token="<bos>", chat_template=template))
    ids = render_chat(tokenizer, [{"role": "user", "content": "truth"}])
    assert ids.count(0) == 1
    assert ids == tokenizer.encode("[user]truth>")


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([], "there are no messages"),
        (["hello"], "message 0 is a str"),
        ([{"content": "hello"}], "message 0 has role None"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], "message 1 has content of type NoneType"),
        ([{"role": "user", "content": 3}], "message 0 has content of type int"),
        ([{"role": "user", "content": ["a"]}], "message 0 has content of type list"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_malformed_messages(demo: Tokenizer, messages: list[dict[str, object]], sentence: str) -> None:
    with pytest.raises(InvalidRequestError, match=sentence) as caught:
        render_chat(demo, messages)
    assert caught.value.field == "prompt"


def test_messages_that_the_template_refuses(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save("byte_level", tmp_path, chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert caught.value.field == "prompt"


def test_a_model_without_chat_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(save("byte_level", tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="this model has none") as caught:
        render_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert caught.value.field == "prompt"


def test_text_that_is_not_unicode(demo: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="at character 2") as caught:
        demo.encode("ab\ud800")
    assert caught.value.field == "prompt"


BAD_WORDS = ["truth", " truth", "a truth", "known", "zq", "don't", "漢字", "é", "  two", "\n", " ", "!?", "#"]


@pytest.mark.parametrize("kind", ["demo", *tiny_tokenizers.ALL])
def test_bad_words_are_what_encoding_makes_of_them(kind: str, demo: Tokenizer, tmp_path: Path) -> None:
    """A text that has the word at its start, behind a space or on a new line has one of the sequences; no special tokens."""
    tokenizer = demo if kind == "demo" else Tokenizer.load(save(kind, tmp_path))
    core = tokenizers.Tokenizer.from_file(str((DEMO if kind == "demo" else tmp_path) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return core.encode(text, add_special_tokens=False).ids

    for word in BAD_WORDS:
        sequences = tokenizer.bad_word_ids(word)
        assert all(sequences)
        assert len(set(sequences)) == len(sequences)
        bare = word.removeprefix(" ")
        expected = {tuple(encode(bare)), tuple(encode(" " + bare))}
        line, before = encode("b\n" + bare), encode("b\n")
        if line[: len(before)] == before:
            expected.add(tuple(line[len(before) :]))
        assert set(sequences) == expected - {()}, word
        unknown = {core.token_to_id("<unk>"), core.token_to_id("[UNK]")}
        for sequence in sequences:
            assert not unknown.isdisjoint(sequence) or tokenizer.decode(sequence).replace(" ", "") == word.replace(" ", "")


@pytest.mark.parametrize(
    ("kind", "word", "expected"),
    [
        ("byte_level", "zq", ["z q", "  z q"]),
        ("unigram_byte_fallback", "truth", [" truth", "t r u t h"]),
        ("unigram_byte_fallback", "q", ["  <0x71>", "<0x71>"]),
        ("bpe_byte_fallback", "in", ["  in", "    in", "in"]),
        ("metaspace", "truth", [" truth", "t r u t h"]),
        ("wordpiece", "\n", []),
        ("wordpiece", "truth", ["truth"]),
    ],
)
def test_bad_words_in_tokens(kind: str, word: str, expected: list[str], tmp_path: Path) -> None:
    core = tiny_tokenizers.ALL[kind]()
    sequences = Tokenizer.load(save(kind, tmp_path)).bad_word_ids(word)
    assert [" ".join(core.id_to_token(token_id) for token_id in ids).replace("▁", " ").replace("Ġ", " ") for ids in sequences] == expected


def test_a_special_token_as_bad_word(demo: Tokenizer) -> None:
    assert demo.bad_word_ids("<|im_end|>") == ((4095,), (*demo.encode(" "), 4095))


def test_a_bad_word_that_is_not_unicode(demo: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="at character 1") as caught:
        demo.bad_word_ids("a\ud800")
    assert caught.value.field == "bad_words"


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_no_readable_tokenizer(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=tmp_path.name):
        Tokenizer.load(tmp_path)


def test_unreadable_config(tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        *(
            ({"chat_template": wrong}, "chat_template in .* is neither a text nor texts")
            for wrong in (5, {"a": 1}, [5], [{"name": "a"}], [[]])
        ),
        *(({key: 5}, f"{key} of the tokenizer in .* is a int") for key in ("extra_special_tokens", "additional_special_tokens")),
        ({"additional_special_tokens": "abc"}, "additional_special_tokens of the tokenizer in .* is a str"),
        ({"bos_token": ["a"], "eos_token": {"content": ["x"]}, "extra_special_tokens": [["x"]]}, None),
    ],
)
def test_values_of_wrong_types(config: dict, message: str | None, tmp_path: Path) -> None:
    save("byte_level", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if message is None:
        Tokenizer.load(tmp_path)
        return
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model"])
def test_a_pipe_is_no_file_of_a_tokenizer(name: str, tmp_path: Path) -> None:
    """To open one would never end."""
    save("byte_level", tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelLoadError, match=f"{name} is not a regular file$"):
        Tokenizer.load(tmp_path)


def test_what_transformers_says_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelLoadError, match="has no tokenizer that can be read: ") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_letters(tmp_path: Path) -> None:
    """It fails on most texts, and its model takes ids all the same."""
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"1": 0, "2": 1}, "none"))
    core.save(str(tmp_path / "tokenizer.json"))
    text_of = text_of_tokens(Tokenizer.load(tmp_path))
    assert [text_of(0), text_of(1)] == ["1", "2"]


def test_fast_tokenizer_of_transformers_without_tokenizer_json(tmp_path: Path) -> None:
    tiny_tokenizers.byte_level().model.save(str(tmp_path))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<eos>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.load(tmp_path)
    assert_same(tokenizer, auto(tmp_path))
    assert tokenizer.encode("truth")[0] == 0, "transformers honours add_bos_token where there is no tokenizer.json"


def test_python_tokenizer_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "ByT5Tokenizer", "chat_template": "{{ messages[0].content }}"})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert_same(tokenizer, auto(tmp_path))
    text = "emoji 😀 漢字, a longer text than the window"
    ids = tokenizer.encode(text)
    detokenizer = tokenizer.detokenizer()
    assert "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush() == text
    assert tokenizer.decode(render_chat(tokenizer, [{"role": "user", "content": text}])) == text


@pytest.mark.parametrize("python", [False, True])
def test_ids_beyond_the_vocabulary_have_no_text(python: bool, tmp_path: Path) -> None:
    """Models have embeddings for more ids than the tokenizer has tokens, and may choose them."""
    if python:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    else:
        save("byte_level", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (letter,) = tokenizer.encode("a", add_special_tokens=False)[:1]
    for beyond in (tokenizer.vocab_size, tokenizer.vocab_size + 1000, 2**31 - 1):
        for skip in (True, False):
            ids = [letter, beyond, letter]
            assert tokenizer.decode(ids, skip) == "aa"
            detokenizer = tokenizer.detokenizer(skip)
            assert "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.flush() == "aa"
        assert tokenizer.piece(beyond) is None


def test_threads_share_a_tokenizer(demo: Tokenizer) -> None:
    """Encoding and chats in workers while the event loop decodes."""
    text = "It is a truth 😀 universally acknowledged. " * 500
    ids = demo.encode(text)
    start = threading.Barrier(4)

    def work(_: int) -> tuple[list[int], list[int]]:
        start.wait()
        return demo.encode(text), render_chat(demo, [{"role": "user", "content": "hi"}])

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(work, index) for index in range(4)]
        while not all(result.done() for result in results):
            assert demo.decode(ids) == text
    assert {tuple(result.result()[0]) for result in results} == {tuple(ids)}
    assert len({tuple(result.result()[1]) for result in results}) == 1


def test_encoding_lets_other_threads_run(demo: Tokenizer) -> None:
    """A long text is encoded without the GIL: this thread gets on meanwhile."""
    text = "It is a truth universally acknowledged. " * 20_000
    ticks = 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(demo.encode, text)
        while not encoding.done():
            ticks += 1
    assert len(encoding.result()) > 100_000
    assert ticks > 1_000


def test_decoding_lets_other_threads_run(demo: Tokenizer) -> None:
    ids = demo.encode("It is a truth universally acknowledged. ") * 150_000
    ticks, interval = 0, sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that this thread gets far only where the other one has let go of the GIL
    try:
        with ThreadPoolExecutor(1) as pool:
            decoding = pool.submit(demo.decode, ids)
            while not decoding.done():
                ticks += 1
    finally:
        sys.setswitchinterval(interval)
    assert len(decoding.result()) == 150_000 * 40
    assert ticks > 20_000
