"""Every method of the schema, driven by clients that share no code with the server, on one server with the demo model."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import v1_schema
from foreign_clients import BUF_CURL, CLIENTS, Caller, CallFailedError, require_clients
from hang_guard import HANG_SECONDS
from server_process import ServerProcess, server_process
from slow_cases import slow_but

from aengine.models.loading.hub import resolve_adapter, resolve_model
from aengine.v1.admin_service_pb2 import (
    ContinueGenerationRequest,
    LoadAdapterRequest,
    PauseGenerationRequest,
    SleepRequest,
    UnloadAdapterRequest,
    WakeRequest,
)
from aengine.v1.admin_service_pb2_grpc import AdminServiceStub
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub

PACKAGE = "aengine.v1"
HEALTH = "grpc.health.v1.Health"
DRAIN = f"{PACKAGE}.AdminService/Drain"  # has a test of its own: it ends the server
TOKEN = "open-sesame"
NUM_TOKENS = 4
ONE_BY_ONE = {"maxTokensPerDelta": 1}
SPEC = {"prompt": {"text": "It was"}, "stopping": {"maxTokens": NUM_TOKENS, "ignoreEos": True}, "stream": ONE_BY_ONE}


class Server:
    """The server, and a channel to bring it into the state that a call is about."""

    def __init__(self, process: ServerProcess, channel: grpc.Channel, over_a_router: bool) -> None:
        self.address = process.address
        self.over_a_router = over_a_router
        self.generation: Any = GenerationServiceStub(channel)
        self.admin: Any = AdminServiceStub(channel)
        self.credentials = (("authorization", f"Bearer {TOKEN}"),)

    @contextmanager
    def request_that_waits(self, request_id: str) -> Iterator[None]:
        self.admin.PauseGeneration(PauseGenerationRequest(), metadata=self.credentials)
        request = StreamGenerateRequest(request_id=request_id)
        request.spec.prompt.text = "It was"
        call = self.generation.StreamGenerate(request)
        next(call)  # accepted
        try:
            yield
        finally:
            call.cancel()
            self.admin.ContinueGeneration(ContinueGenerationRequest(), metadata=self.credentials)


@pytest.fixture(scope="module")
def admin_flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    path = tmp_path_factory.mktemp("tokens") / "admins"
    path.write_text(f"operator {TOKEN}\n")
    return ("--admin-token-file", str(path), "--weights-roots", str(resolve_adapter("demo-lora").parent))


@pytest.fixture(scope="module", params=["engine", pytest.param("router", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, admin_flags: tuple[str, ...]) -> Iterator[Server]:
    replicas = ("--replicas", "2") if request.param == "router" else ()
    with server_process(*admin_flags, *replicas, "--host-kv-memory", "64MiB") as process, grpc.insecure_channel(process.address) as channel:
        yield Server(process, channel, bool(replicas))


@pytest.fixture(params=CLIENTS)
def caller(request: pytest.FixtureRequest, server: Server) -> Caller:
    require_clients()
    return Caller(CLIENTS[request.param], server.address, TOKEN)


Check = Callable[[str, Caller, Server], None]
CHECKS: dict[str, Check] = {}


def drives(method: str) -> Callable[[Check], Check]:
    """The decorated function calls `method`, whose name it gets, and checks what comes back."""

    def register(check: Check) -> Check:
        CHECKS[method] = check
        return check

    return register


def check_events(events: list[Any]) -> None:
    kinds = [next(kind for kind in ("started", "delta", "sequenceFinished", "finished") if kind in event) for event in events]
    assert kinds == ["started", *["delta"] * NUM_TOKENS, "sequenceFinished", "finished"]
    assert [int(event.get("eventNumber", 0)) for event in events] == list(range(NUM_TOKENS + 3))
    assert events[-2]["sequenceFinished"]["finish"]["reason"] == "FINISH_REASON_MAX_TOKENS"
    assert events[-1]["finished"]["usage"]["completionTokens"] == NUM_TOKENS
    assert "".join(event["delta"].get("text", "") for event in events[1:-2])


def check_answer(response: Any) -> None:
    (sequence,) = response["sequences"]
    assert sequence["text"]
    assert (sequence["numTokens"], sequence["finish"]["reason"]) == (NUM_TOKENS, "FINISH_REASON_MAX_TOKENS")


@drives(f"{PACKAGE}.GenerationService/Generate")
def _generate(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"spec": SPEC, "requestId": "mine"})
    assert response["requestId"] == "mine"
    check_answer(response)


@drives(f"{PACKAGE}.GenerationService/StreamGenerate")
def _stream_generate(method: str, caller: Caller, server: Server) -> None:
    check_events([response["event"] for response in caller.call(method, {"spec": SPEC})])
    tool = {"name": "now", "parameters": {"enum": [{"day": 1}, {"day": 2}]}}
    chat = {"messages": [{"role": "user", "content": "When?"}], "tools": [json.dumps(tool)]}
    called = caller.call(method, {"spec": {"prompt": {"chat": chat}, "output": {"chat": {"toolChoice": "now"}}}})
    started, *arguments, ended = [part for response in called for part in response["event"].get("delta", {}).get("chatEvents", ())]
    assert started["callStarted"]["name"] == "now"
    assert json.loads("".join(part["arguments"]["text"] for part in arguments)) in ({"day": 1}, {"day": 2})
    assert ended["callEnded"]["complete"]


@drives(f"{PACKAGE}.GenerationService/CancelRequests")
def _cancel_requests(method: str, caller: Caller, server: Server) -> None:
    with server.request_that_waits("victim"):
        (response,) = caller.call(method, {"requestIds": ["victim", "nobody"]})
    assert response == {"cancelledRequestIds": ["victim"], "unknownRequestIds": ["nobody"]}


@drives(f"{PACKAGE}.GenerationService/BatchGenerate")
def _batch_generate(method: str, caller: Caller, server: Server) -> None:
    responses = caller.call(method, {"requests": [{"spec": SPEC}, {"spec": {}}, {"spec": SPEC}]})
    results = {response.get("index", 0): response for response in responses}
    assert len(responses) == len(results) == 3
    check_answer(results[0]["response"])
    check_answer(results[2]["response"])
    error = results[1]["error"]
    assert (error["code"], error["reason"], error["fieldViolations"][0]["field"]) == (3, "INVALID_FIELD", "spec.prompt")


@drives(f"{PACKAGE}.GenerationService/DeleteBatch")
def _delete_batch(method: str, caller: Caller, server: Server) -> None:
    asked = {"requests": [{"spec": SPEC}], "batchId": "kept"}
    (response,) = caller.call(f"{PACKAGE}.GenerationService/BatchGenerate", asked)
    check_answer(response["response"])
    assert caller.call(method, {"batchId": "kept"}) == [{}]


@drives(f"{PACKAGE}.GenerationService/Session")
def _session(method: str, caller: Caller, server: Server) -> None:
    submits = [{"submit": {"tag": tag, "request": {"spec": spec}}} for tag, spec in (("7", SPEC), ("8", {}), ("9", SPEC))]
    responses = caller.call(method, {"open": {}}, *submits, {"hold": {"tag": "10", "held": True}}, {"cancel": {"tag": "10"}})
    events: dict[str, list[Any]] = {"7": [], "8": [], "9": []}
    for event in (event for response in responses for event in response["events"]):
        events[event["tag"]].append(event.get("event") or event["error"])
    check_events(events["7"])
    check_events(events["9"])
    (error,) = events["8"]
    assert error["reason"] == "INVALID_FIELD"


@drives(f"{PACKAGE}.GenerationService/ResumeGenerate")
def _resume_generate(method: str, caller: Caller, server: Server) -> None:
    request = StreamGenerateRequest()
    request.spec.prompt.text, request.spec.stopping.max_tokens, request.spec.stopping.ignore_eos = "It was", NUM_TOKENS, True
    request.spec.stream.resumable, request.spec.stream.max_tokens_per_delta = True, 1
    first, *others = (response.event for response in server.generation.StreamGenerate(request))
    assert len(others) == NUM_TOKENS + 2
    token = base64.b64encode(first.started.resume_token).decode()
    key = {"requestId": first.started.request_id, "resumeToken": token}
    check_events([response["event"] for response in caller.call(method, key)])
    last = caller.call(method, {**key, "nextEventNumber": str(NUM_TOKENS + 1)})
    assert [next(iter(response["event"].keys() - {"eventNumber"})) for response in last] == ["sequenceFinished", "finished"]


@drives(f"{PACKAGE}.GenerationService/GetRequest")
def _get_request(method: str, caller: Caller, server: Server) -> None:
    with server.request_that_waits("patient"):
        (response,) = caller.call(method, {"requestId": "patient"})
    assert (response["requestId"], response["state"]) == ("patient", "REQUEST_STATE_WAITING")


@drives(f"{PACKAGE}.EmbeddingService/Embed")
def _embed(method: str, caller: Caller, server: Server) -> None:
    request = {"inputs": [{"text": "It was"}, {"tokenIds": {"ids": [5, 6]}}], "pooling": "POOLING_MEAN", "dimensions": 3, "normalize": True}
    (response,) = caller.call(method, request)
    assert [(len(one["values"]), one["numTokens"]) for one in response["embeddings"]][1] == (3, 2)
    assert all(abs(sum(value**2 for value in one["values"]) - 1) < 1e-5 for one in response["embeddings"])


@drives(f"{PACKAGE}.EmbeddingService/StreamHiddenStates")
def _hidden_states(method: str, caller: Caller, server: Server) -> None:
    pieces = caller.call(method, {"prompt": {"tokenIds": {"ids": [5, 6, 7]}}, "layers": [0, -1], "firstToken": 1})
    assert pieces[0]["numTokens"] == 3
    assert sum(len(base64.b64decode(piece.get("states", ""))) for piece in pieces) == 2 * 2 * 256 * 4


@drives(f"{PACKAGE}.TokenizerService/Tokenize")
def _tokenize(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"text": "é a", "withPieces": True, "addSpecialTokens": False})
    assert response["numTokens"] == len(response["tokenIds"]) == len(response["pieces"])
    assert (response["startOffsets"][0], response["endOffsets"][-1]) == (0, 4)


@drives(f"{PACKAGE}.TokenizerService/Detokenize")
def _detokenize(method: str, caller: Caller, server: Server) -> None:
    (tokens,) = caller.call(f"{PACKAGE}.TokenizerService/Tokenize", {"text": "naïve 😀"})
    assert caller.call(method, {"tokenIds": tokens["tokenIds"]}) == [{"text": "naïve 😀"}]
    (response,) = caller.call(method, {"tokenIds": tokens["tokenIds"], "withTokenBytes": True})
    assert b"".join(map(base64.b64decode, response["tokenBytes"])).decode() == "naïve 😀"


@drives(f"{PACKAGE}.TokenizerService/RenderChat")
def _render_chat(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"chat": {"messages": [{"role": "user", "content": "How do you do?"}]}})
    assert "How do you do?" in response["text"]
    assert response["tokenIds"]


@drives(f"{PACKAGE}.ModelService/GetModel")
def _get_model(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"model": "demo"})
    assert (response["model"]["name"], response["model"]["vocabSize"]) == ("demo", 4096)


@drives(f"{PACKAGE}.ModelService/ListModels")
def _list_models(method: str, caller: Caller, server: Server) -> None:
    (model,) = caller.call(f"{PACKAGE}.ModelService/GetModel")
    assert caller.call(method) == [{"models": [model["model"]]}]


@drives(f"{PACKAGE}.EngineService/GetServerInfo")
def _get_server_info(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method)
    assert (response["model"], response["limits"]["maxModelLen"] > 0, bool(response["version"])) == ("demo", True, True)


@drives(f"{PACKAGE}.EngineService/GetLoad")
def _get_load(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method)
    assert response["load"]["pagesTotal"] > 0


@drives(f"{PACKAGE}.EngineService/WatchLoad")
def _watch_load(method: str, caller: Caller, server: Server) -> None:
    with caller.watch(method, {}) as responses:
        assert next(responses)["load"]["pagesTotal"] == next(responses)["load"]["pagesTotal"] > 0


@drives(f"{PACKAGE}.AdminService/Profile")
def _profile(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"numSteps": 1, "timeLimit": "0.01s"})
    assert json.loads(base64.b64decode(response["trace"]))["traceEvents"]


@drives(f"{PACKAGE}.AdminService/FlushCache")
def _flush_cache(method: str, caller: Caller, server: Server) -> None:
    caller.call(
        f"{PACKAGE}.GenerationService/Generate", {"spec": {**SPEC, "prompt": {"text": "It is a truth universally acknowledged. " * 8}}}
    )
    (response,) = caller.call(method)
    assert response["freedPages"] > 0
    (load,) = caller.call(f"{PACKAGE}.EngineService/GetLoad")
    assert "cachedTokens" not in load["load"]


@drives(f"{PACKAGE}.AdminService/PauseGeneration")
def _pause_generation(method: str, caller: Caller, server: Server) -> None:
    with server.request_that_waits("victim"):
        assert caller.call(method, {"mode": "PAUSE_MODE_CANCEL"}) == [{"cancelledRequests": 1}]
        (load,) = caller.call(f"{PACKAGE}.EngineService/GetLoad")
        assert load["load"]["paused"]


@drives(f"{PACKAGE}.AdminService/ContinueGeneration")
def _continue_generation(method: str, caller: Caller, server: Server) -> None:
    server.admin.PauseGeneration(PauseGenerationRequest(), metadata=server.credentials)
    assert caller.call(method) == [{}]
    (response,) = caller.call(f"{PACKAGE}.GenerationService/Generate", {"spec": SPEC})
    check_answer(response)


@drives(f"{PACKAGE}.AdminService/LoadAdapter")
def _load_adapter(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"name": "dictionary", "path": str(resolve_adapter("demo-lora"))})
    try:
        assert (response["adapter"]["name"], response["adapter"]["rank"]) == ("dictionary", 8)
        (answer,) = caller.call(f"{PACKAGE}.GenerationService/Generate", {"spec": {**SPEC, "adapter": "dictionary"}})
        check_answer(answer)
    finally:
        server.admin.UnloadAdapter(UnloadAdapterRequest(name="dictionary"), metadata=server.credentials)


@drives(f"{PACKAGE}.AdminService/UnloadAdapter")
def _unload_adapter(method: str, caller: Caller, server: Server) -> None:
    request = LoadAdapterRequest(name="dictionary", path=str(resolve_adapter("demo-lora")))
    server.admin.LoadAdapter(request, metadata=server.credentials)
    assert caller.call(method, {"name": "dictionary"}) == [{}]


@drives(f"{PACKAGE}.AdminService/Sleep")
def _sleep(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"mode": "SLEEP_MODE_CANCEL"})
    assert int(response["memory"]["bytesAfter"]) > 0
    server.admin.Wake(WakeRequest(), metadata=server.credentials)


@drives(f"{PACKAGE}.AdminService/Wake")
def _wake(method: str, caller: Caller, server: Server) -> None:
    server.admin.Sleep(SleepRequest(), metadata=server.credentials)
    (response,) = caller.call(method)
    assert int(response["memory"]["bytesAfter"]) > 0


@drives(f"{PACKAGE}.AdminService/UpdateWeights")
def _update_weights(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method, {"path": str(resolve_model("demo")), "mode": "UPDATE_MODE_FINISH"})
    assert int(response["weightsVersion"]) > 0


@drives(f"{PACKAGE}.GenerationService/TouchSession")
def _touch(method: str, caller: Caller, server: Server) -> None:
    assert caller.call(method, {"session": "nobody's"}) == [{}]


KV_PREFIX = {"tokenIds": [7, *range(5, 105)]}


def _computed(caller: Caller) -> str:
    """The identity of the KV of the prefix, which the server has then."""
    spec = {**SPEC, "prompt": {"tokenIds": {"ids": KV_PREFIX["tokenIds"]}}}
    caller.call(f"{PACKAGE}.GenerationService/Generate", {"spec": spec})
    (found,) = caller.call(f"{PACKAGE}.AdminService/FindKv", {"prefix": KV_PREFIX})
    assert found["numTokens"] == 96
    return str(found["identity"])


@drives(f"{PACKAGE}.AdminService/FindKv")
@drives(f"{PACKAGE}.AdminService/ExportKv")
@drives(f"{PACKAGE}.AdminService/ImportKv")
def _kv(method: str, caller: Caller, server: Server) -> None:
    if server.over_a_router:
        with pytest.raises(CallFailedError, match="KV is kept by the replicas behind this server"):
            caller.call(f"{PACKAGE}.AdminService/FindKv", {"prefix": KV_PREFIX})
        return
    export = {"prefix": KV_PREFIX, "identity": _computed(caller), "skipTokens": 64}
    pages = caller.call(f"{PACKAGE}.AdminService/ExportKv", export)
    assert [page["page"]["index"] for page in pages] == [4, 5]
    assert caller.call(f"{PACKAGE}.AdminService/ImportKv", {"prefix": export}, *pages) == [{"numTokens": 32}]


@drives(f"{HEALTH}/Check")
def _check(method: str, caller: Caller, server: Server) -> None:
    assert caller.call(method, {"service": f"{PACKAGE}.GenerationService"}) == [{"status": "SERVING"}]


@drives(f"{HEALTH}/List")
def _list(method: str, caller: Caller, server: Server) -> None:
    (response,) = caller.call(method)
    assert response["statuses"] == {name: {"status": "SERVING"} for name in ("", *(service.full_name for service in v1_schema.services()))}


@drives(f"{HEALTH}/Watch")
def _watch(method: str, caller: Caller, server: Server) -> None:
    with caller.watch(method, {}) as responses:
        assert next(responses) == {"status": "SERVING"}


def test_every_method_of_the_schema_is_driven() -> None:
    assert {*CHECKS, DRAIN} == v1_schema.methods() | {f"{HEALTH}/{name}" for name in ("Check", "List", "Watch")}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("method", slow_but(lambda method: method.endswith("GenerationService/StreamGenerate"), sorted(CHECKS)))
def test_call(method: str, caller: Caller, server: Server) -> None:
    CHECKS[method](method, caller, server)


@pytest.mark.slow
@pytest.mark.parametrize("client", CLIENTS)
def test_drain_ends_the_server(client: str, admin_flags: tuple[str, ...]) -> None:
    require_clients()
    with server_process(*admin_flags) as process:
        caller = Caller(CLIENTS[client], process.address, TOKEN)
        assert caller.call(DRAIN) == [{}]  # no request is in flight
        assert process.end() == 0


def test_a_failure_is_shown_with_its_violations(caller: Caller) -> None:
    with pytest.raises(CallFailedError, match=r"(?is)invalid_argument.*spec\.sampling\.top_p"):
        caller.call(f"{PACKAGE}.GenerationService/Generate", {"spec": {"prompt": {"text": "a"}, "sampling": {"topP": 7}}})


def test_reflection_lists_what_the_schema_declares(server: Server) -> None:
    require_clients()
    result = subprocess.run([*BUF_CURL, "--list-methods", f"http://{server.address}"], capture_output=True, text=True, timeout=HANG_SECONDS)
    listed = set(result.stdout.split())
    assert {method for method in listed if not method.startswith("grpc.")} == v1_schema.methods()
    assert f"{HEALTH}/Check" in listed


def test_the_example_streams(server: Server) -> None:
    program = Path(v1_schema.ROOT, "examples", "grpc_client.py")
    command = [sys.executable, program, "It is a truth universally", "--address", server.address, "--max-tokens", "4"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=True)
    assert result.stdout.startswith("It is a truth universally")
    assert re.search(r"\[(MAX_TOKENS|EOS), [1-4] tokens in \d+ ms\]", result.stdout)
