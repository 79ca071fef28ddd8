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


@pytest.mark.parametrize(
    ("kind", "text", "wire"),
    [
        (StreamGenerateRequest, REQUEST, REQUEST_WIRE),
        (StreamGenerateResponse, DELTA, DELTA_WIRE),
        (StreamGenerateResponse, END, END_WIRE),
    ],
)
def test_the_bytes_of_v1_mean_what_they_always_meant(kind: type[Message], text: str, wire: str) -> None:
    """Bytes of a client built against the first schema. If this fails, the schema broke its users."""
    assert kind.FromString(bytes.fromhex(wire)) == text_format.Parse(text, kind())


def test_fields_that_travel_per_token_have_one_byte_tags() -> None:
    for message in (StreamGenerateResponse, generation_pb2.GenerationEvent, generation_pb2.GenerationDelta):
        assert max(message.DESCRIPTOR.fields_by_number) <= 15
