"""The blocks of an output: each token belongs to that in which its text begins, however the output is read."""

from __future__ import annotations

import pytest
from chat_engine import TOOL, TURN

from aengine.api.outputs import FinishReason, Token
from aengine.chat import ChatFormat, ChatParser
from aengine.server.http.chat_output import ContentBlocks, Piece

TEXT = TURN.replace("look.", "look, é.")


@pytest.mark.parametrize("at_once", [1, 2, 7, 1000])
def test_blocks_and_their_tokens(at_once: int) -> None:
    texts = [*TEXT.replace("é", "\0é"), ""]
    texts[texts.index("\0")] = ""  # half a character has no text yet; nor has the end
    tokens = [Token(0, index, text) for index, text in enumerate(texts)]
    end = tokens[-1] = Token(0, len(texts) - 1, "", finish_reason=FinishReason.EOS)
    blocks, parser = ContentBlocks(with_tokens=True), ChatParser(ChatFormat("hermes", "think"), [{"type": "function", "function": TOOL}])
    changes = []
    for start in range(0, len(tokens), at_once):
        run = tokens[start : start + at_once]
        events = parser.feed("".join(token.text for token in run))
        events += parser.finish() if run[-1] is end else []
        changes += list(blocks.read(Piece(0, run, events, run[-1])))
    reasoning, answer, call = blocks.all
    assert [(block.kind, block.text, block.is_whole) for block in blocks.all] == [
        ("reasoning", "Where is it?", True),
        ("text", "I shall look, é.", True),
        ("call", '{"city": "Bath"}', True),
    ]
    assert (call.name, call.index) == ("weather", 2)
    assert [token.token_id for token in answer.tokens] == list(range(TEXT.index("I shall"), TEXT.index("<tool_call>") + 1))
    for block in blocks.all:
        kinds = [change.kind for change in changes if change.block is block]
        assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("opened", "closed", {"added"})
        assert "".join(change.text for change in changes if change.block is block) == block.text
        assert [token for change in changes if change.block is block for token in change.tokens] == block.tokens
    assert end not in reasoning.tokens + answer.tokens + call.tokens
