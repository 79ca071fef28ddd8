"""A model without a tokenizer behind a server, seen from the client and on the wire."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_harness import failure_of, serving, stream_request

import aengine
from aengine import AsyncEngine, InvalidRequestError, NoTokenizerError, SamplingParams, StructuredOutput
from aengine.client import AsyncClient
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio

DEMO = Path(aengine.__file__).parent / "models" / "demo_model"


async def test_ids_go_in_and_come_out_and_what_needs_text_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO / name)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    async with AsyncEngine(str(tmp_path), kv_cache_memory=32 << 20) as engine, serving(engine) as serve:
        expected = await engine.generate([5, 6, 7], params)
        assert (await serve.model.GetModel(GetModelRequest())).model.without_tokenizer
        async with AsyncClient(serve.server.address) as client:
            assert not client.model_info.tokenizer
            assert (await client.generate([5, 6, 7], params)).token_ids == expected.token_ids
            for refused, field in (
                (SamplingParams(stop="a"), "stop"),
                (SamplingParams(bad_words="a"), "bad_words"),
                (SamplingParams(structured_output=StructuredOutput(regex="a")), "structured_output"),
                (SamplingParams(detokenize=True), "detokenize"),
            ):
                with pytest.raises(InvalidRequestError, match=f"{field}: it needs a tokenizer, and this model has none"):
                    await client.generate([5], refused)
            for prompt in ("text", [{"role": "user", "content": "text"}]):
                with pytest.raises(InvalidRequestError, match=r"prompt: .* needs a tokenizer, and this model has none; give token ids"):
                    await client.generate(prompt)
            for call in (client.tokenize("a"), client.detokenize([5]), client.render_chat([{"role": "user", "content": "a"}])):
                with pytest.raises(NoTokenizerError):
                    await call
        with pytest.raises(aio.AioRpcError) as caught:
            await serve.generation.StreamGenerate(stream_request("text", stopping={"stop_strings": ["a"]})).read()
        assert failure_of(caught.value).fields == ["spec.prompt.text", "spec.stopping.stop_strings"]
        request = StreamGenerateRequest()
        request.spec.prompt.token_ids.ids.append(5)
        request.spec.output.text = True
        with pytest.raises(aio.AioRpcError) as caught:
            await serve.generation.StreamGenerate(request).read()
        failure = failure_of(caught.value)
        assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["spec.output.text"])
