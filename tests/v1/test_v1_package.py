"""The generated package: light to import, and bound to the wire format for ever."""

from __future__ import annotations

import subprocess
import sys

import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

from aengine.v1 import generation_pb2
from aengine.v1.generation_service_pb2 import StreamGenerateRequest, StreamGenerateResponse


@pytest.mark.parametrize("module", ["generation_service_pb2_grpc", "model_service_pb2_grpc"])
def test_stubs_import_without_the_engine_and_without_a_warning(module: str) -> None:
    code = f"import sys, aengine.v1.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert f"aengine.v1.{module}" in loaded
    assert not {"torch", "transformers", "tokenizers", "numpy"} & set(loaded)
    assert not {name for name in loaded if name.startswith(("aengine.engine", "aengine.server"))}


REQUEST = """
    request_id: "id"
    spec {
      model: "demo" prompt { text: "Once" } priority: -1 tenant: "t"
      sampling { temperature: 0.5 top_p: 0.75 top_k: 40 min_p: 0.25 seed: 18446744073709551615 }
      stopping { max_tokens: 16 stop_token_ids: [5, 300] ignore_eos: true time_limit { seconds: 2 } }
      output { text: true token_ids: false } cache { salt: "salt" }
    }
"""
REQUEST_WIRE = (
    "0a570a0464656d6f12060a044f6e63651a1c0d0000003f150000403f1828250000803e30ffffffffffffffffff01220d0810220305ac02300142020802"
    "3204080110003a06120473616c7448ffffffffffffffffff015a017412026964"
)
DELTA = 'event { event_number: 7 delta { sequence_index: 1 token_offset: 2 token_ids: 300 num_tokens: 1 text: "h\\303\\251" } }'
DELTA_WIRE = "0a130807220f080110021a02ac0220012a0368c3a9"
END = """
    event {
      event_number: 8
      sequence_finished { sequence_index: 1 num_tokens: 3 finish { reason: FINISH_REASON_STOP_TOKEN stop_token_id: 5 } }
    }
"""
END_WIRE = "0a0e08082a0a080110031a0408031805"

DECODING = """
    spec {
      sampling {
        n: 3 presence_penalty: 0.5 frequency_penalty: -0.5 repetition_penalty: 1.25 logit_bias { key: 300 value: -100 }
        allowed_token_ids: [7, 300] banned_token_ids: 9 banned_strings: "no"
      }
      stopping { min_tokens: 2 stop_strings: "end" include_stop_in_output: true }
      structured_output { choices { values: "yes" values: "no" } }
      output { logprobs { top_k: 2 } prompt_logprobs {} skip_special_tokens: false effective_params: true }
    }
"""
DECODING_WIRE = (
    "0a4e1a283803450000003f4d000000bf550000a03f6a0808ac02150000c8c2720307ac027a01098201026e6f220910021a03656e6438012a0b22090a0379"
    "65730a026e6f320a220208022a0038004001"
)
SCHEMA, SCHEMA_WIRE = 'spec { structured_output { json_schema: "{}" } }', "0a062a040a027b7d"
OBJECT, OBJECT_WIRE = "spec { structured_output { json_object {} } }", "0a042a021200"
REGEX, REGEX_WIRE = 'spec { structured_output { regex: "a" } }', "0a052a031a0161"
GRAMMAR, GRAMMAR_WIRE = 'spec { structured_output { grammar { source: "g" } } }', "0a072a052a030a0167"
LOGPROBS = """
    event {
      delta { logprobs { logprobs: -1.5 ranks: 300 top_k: 2 top_token_ids: [4, 300] top_logprobs: [-0.25, -1.5] } }
    }
"""
LOGPROBS_WIRE = "0a1f221d321b0a040000c0bf1202ac021802220304ac022a08000080be0000c0bf"
PROMPT = "event { event_number: 1 prompt_logprobs { token_offset: 2 logprobs { logprobs: -0.5 ranks: 1 } } }"
PROMPT_WIRE = "0a1108011a0d080212090a04000000bf120101"
STOPPED = 'event { sequence_finished { finish { reason: FINISH_REASON_STOP_STRING stop_string: "end" } } }'
STOPPED_WIRE = "0a0b2a091a0708021203656e64"


@pytest.mark.parametrize(
    ("kind", "text", "wire"),
    [
        (StreamGenerateRequest, REQUEST, REQUEST_WIRE),
        (StreamGenerateResponse, DELTA, DELTA_WIRE),
        (StreamGenerateResponse, END, END_WIRE),
        (StreamGenerateRequest, DECODING, DECODING_WIRE),
        (StreamGenerateRequest, SCHEMA, SCHEMA_WIRE),
        (StreamGenerateRequest, OBJECT, OBJECT_WIRE),
        (StreamGenerateRequest, REGEX, REGEX_WIRE),
        (StreamGenerateRequest, GRAMMAR, GRAMMAR_WIRE),
        (StreamGenerateResponse, LOGPROBS, LOGPROBS_WIRE),
        (StreamGenerateResponse, PROMPT, PROMPT_WIRE),
        (StreamGenerateResponse, STOPPED, STOPPED_WIRE),
    ],
)
def test_the_bytes_of_v1_mean_what_they_always_meant(kind: type[Message], text: str, wire: str) -> None:
    """Bytes of clients built when the fields were new. If this fails, the schema broke its users."""
    assert kind.FromString(bytes.fromhex(wire)) == text_format.Parse(text, kind())


def test_fields_that_travel_per_token_have_one_byte_tags() -> None:
    messages = (StreamGenerateResponse, generation_pb2.GenerationEvent, generation_pb2.GenerationDelta, generation_pb2.TokenLogprobs)
    for message in messages:
        assert max(message.DESCRIPTOR.fields_by_number) <= 15
