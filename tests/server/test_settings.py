"""Where the configuration comes from, which source wins, and how each of them is told what is wrong with it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError
from aengine.router.router_config import RayConfig, RouterConfig
from aengine.server.config.options import GROUPS, ServerConfig
from aengine.server.config.settings import HTTP, Settings, SettingsError, options, read_settings


def refused(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, file: str | None = None) -> str:
    with pytest.raises(SettingsError) as caught:
        read_settings(flags or {}, environ or {}, file)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "aengine.toml"


def test_every_field_is_an_option_once_and_in_a_group() -> None:
    names = [option.name for option in options()]
    assert sorted(names) == sorted(field.name for cls in (ServerConfig, EngineConfig, RouterConfig, RayConfig) for field in fields(cls))
    assert len(set(names)) == len(names), "a flag and a variable must mean one thing"
    assert {option.group for option in options() if option.table == "server"} == set(GROUPS.values())
    assert all(option.help for option in options())


def test_without_any_source_the_defaults_hold() -> None:
    assert read_settings({}, {}) == Settings(ServerConfig(), EngineConfig(model="demo"), None, RayConfig(), {})


def test_the_port_of_aengine_serve_is_that_of_http() -> None:
    """Its flags and defaults are its own; the names of variables, keys and fields are not."""
    server = read_settings({}, {}, program=HTTP).server
    assert (server.port, server.http_port) == (None, 8000)
    server = read_settings({"http_port": "0"}, {"AENGINE_PORT": "7", "AENGINE_HTTP_PORT": "8"}, program=HTTP).server
    assert (server.port, server.http_port) == (7, 0)
    flags = {option.name: option.flag for option in options(HTTP)}
    assert (flags["http_port"], flags["port"], flags["page_size"]) == ("--port", "--grpc-port", "--page-size")
    assert len({*flags.values()}) == len(flags)
    with pytest.raises(SettingsError, match="--port: 'x' is not an integer"):
        read_settings({"http_port": "x"}, {}, program=HTTP)


def test_flags_win_over_the_environment_over_the_file(config_file: Path) -> None:
    config_file.write_text('[server]\nport = 1\nhost = "::1"\nlog_level = "error"\n[engine]\npage_size = 8\nseed = 5\n')
    settings = read_settings({"port": "3"}, {"AENGINE_PORT": "2", "AENGINE_LOG_LEVEL": "debug", "AENGINE_SEED": "6"}, str(config_file))
    server, engine = settings.server, settings.engine
    assert (server.port, server.log_level, server.host, engine.seed, engine.page_size) == (3, "debug", "::1", 6, 8)
    assert settings.origins == {
        "port": "--port",
        "log_level": "AENGINE_LOG_LEVEL",
        "host": f"{config_file}: server.host",
        "seed": "AENGINE_SEED",
        "page_size": f"{config_file}: engine.page_size",
    }


def test_the_file_can_be_named_by_a_variable_but_the_flag_wins(config_file: Path, tmp_path: Path) -> None:
    config_file.write_text("[server]\nport = 1\n")
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 2\n")
    environ = {"AENGINE_CONFIG": str(config_file)}
    assert read_settings({}, environ).server.port == 1
    assert read_settings({}, environ, str(other)).server.port == 2


@pytest.mark.parametrize(
    ("name", "text", "toml", "value"),
    [
        ("revision", "v1", '"v1"', "v1"),
        ("kv_cache_memory", "1.5g", '"1.5GB"', 1_500_000_000),
        ("kv_cache_memory", "512MiB", "536870912", 512 << 20),
        ("kv_cache_memory", "none", '"none"', None),
        ("max_message_bytes", "64KiB", '"64Ki"', 65536),
        ("dtype", "bf16", '"bf16"', "bfloat16"),
        ("served_model_name", "a, b/c", '["a", "b/c"]', ("a", "b/c")),
        ("model_aliases", "claude-*, gpt-*=tuned", '["claude-*", "gpt-*=tuned"]', ("claude-*", "gpt-*=tuned")),
        ("max_model_len", "64", "64", 64),
        ("max_queued_requests", "none", '"none"', None),
        ("gpu_memory_utilization", "0.5", "0.5", 0.5),
        ("step_timeout", "7", "7", 7.0),
        ("enable_prefix_cache", "off", "false", False),
        ("insecure", "Yes", "true", True),
        ("tenant_weights", "a=2, b=0.5", "{a = 2, b = 0.5}", {"a": 2.0, "b": 0.5}),
        ("adapters", "a=some/x=y, b = /z", '{a = "some/x=y", b = "/z"}', {"a": "some/x=y", "b": "/z"}),
        ("drain_delay", "1.5", "1.5", 1.5),
        ("metrics_port", "9090", "9090", 9090),
        ("graph_sizes", "1, 2,4", "[1, 2, 4]", (1, 2, 4)),
        ("graph_sizes", "none", '"none"', None),
        ("eager", "on", "true", True),
        ("speculative", "ngram", '"ngram"', "ngram"),
        ("max_drafts", "7", "7", 7),
    ],
)
def test_values_have_the_types_of_their_fields(name: str, text: str, toml: str, value: object, config_file: Path) -> None:
    (table,) = (option.table for option in options() if option.name == name)
    config_file.write_text(f"[{table}]\n{name} = {toml}\n")
    for settings in (
        read_settings({name: text}, {}),
        read_settings({}, {f"AENGINE_{name.upper()}": text}),
        read_settings({}, {}, str(config_file)),
    ):
        assert getattr(getattr(settings, table), name) == value


def test_a_draft_model_and_its_mode() -> None:
    engine = read_settings({"speculative": "draft"}, {"AENGINE_SPECULATIVE_MODEL": "x"}).engine
    assert (engine.speculative, engine.speculative_model) == ("draft", "x")
    for given, told in (
        ({"speculative": "eagle"}, "--speculative-model: is missing: speculative 'eagle' needs an EAGLE-3 head"),
        ({"speculative": "vigorous"}, "--speculative: 'vigorous' is not one of off, ngram, draft, eagle, mtp, auto"),
        ({"max_drafts": "17"}, "--max-drafts: 17 is not an integer in [1, 16]"),
    ):
        assert told in refused(given)


def test_names_of_certificates_are_a_list(config_file: Path) -> None:
    config_file.write_text('[server]\ntls_cert = "c"\ntls_key = "k"\ntls_client_ca = "a"\nadmin_client_names = ["x", "y z"]\n')
    assert read_settings({}, {}, str(config_file)).server.admin_client_names == ("x", "y z")
    assert read_settings({"admin_client_names": "p, q"}, {}, str(config_file)).server.admin_client_names == ("p", "q")


def test_a_size_that_is_none(config_file: Path) -> None:
    assert refused({"kv_cache_memory": "8XB"}) == (
        "--kv-cache-memory: '8XB' is not a number of bytes such as 8GB (8 * 1000^3) or 512MiB (512 * 1024^2)"
    )
    config_file.write_text("[engine]\nkv_cache_memory = 1.5\n")
    assert f"{config_file}: engine.kv_cache_memory: 1.5 is not a number of bytes" in refused({}, {}, str(config_file))


@pytest.mark.parametrize("name", ["port", "drain_seconds", "tenant_weights", "insecure", "graph_sizes"])
def test_what_cannot_be_read_is_told_with_its_flag_or_variable(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    assert refused({name: "a=x"}).startswith(f"{flag}: 'a=x' is not ")
    assert refused({}, {f"AENGINE_{name.upper()}": "a=x"}).startswith(f"AENGINE_{name.upper()}: 'a=x' is not ")


def test_what_is_out_of_range_is_told_with_its_source(config_file: Path) -> None:
    assert refused({"port": "70000"}) == "--port: 70000 is not an integer in [0, 65535]"
    assert refused({}, {"AENGINE_PAGE_SIZE": "3"}) == "AENGINE_PAGE_SIZE: 3 is not a power of two in [1, 256]"
    config_file.write_text("[server]\nstall_seconds = 0\n")
    assert refused({}, {}, str(config_file)) == f"{config_file}: server.stall_seconds: 0.0 is not a finite number > 0"


def test_unknown_variables_name_the_nearest_one() -> None:
    assert refused({}, {"AENGINE_PROT": "1"}) == "AENGINE_PROT: there is no such variable; the nearest is AENGINE_PORT"
    assert "AENGINE_MAX_NUM_SEQS" in refused({}, {"AENGINE_MAX_SEQS": "1"})
    read_settings({}, {"AENGINE_CPU_LEVEL": "whatever", "AENGINER": "1", "PATH": "/bin"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1\n", "server.prot: there is no such key; the nearest is port"),
        ("[server]\nmodel = 'demo'\n", "server.model: there is no such key"),
        ("[sever]\nport = 1\n", "sever: there are only the tables [server], [engine], [router], [ray]"),
        ("port = 1\n", "port: there are only the tables [server], [engine], [router], [ray]"),
        ("[server]\nport = '1'\n", "server.port: '1' is not an integer"),
        ("[server]\nport = true\n", "server.port: True is not an integer"),
        ("[server]\nport = 1.0\n", "server.port: 1.0 is not an integer"),
        ("[server]\ninsecure = 1\n", "server.insecure: 1 is not true or false"),
        ("[server\n", "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(text: str, message: str, config_file: Path) -> None:
    config_file.write_text(text)
    told = refused({}, {}, str(config_file))
    assert told.startswith(f"{config_file}: ")
    assert message in told


def test_a_file_that_is_not_there_is_refused(config_file: Path) -> None:
    assert refused({}, {}, str(config_file)) == f"{config_file}: cannot be read: No such file or directory"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com"])
def test_plain_text_for_others_must_be_asked_for(host: str) -> None:
    told = refused({"host": host})
    assert told.startswith(f"--host: '{host}' can be reached from elsewhere")
    assert refused({"host": host, "token_file": "t"}) == told
    assert read_settings({"host": host, "insecure": True}, {}).server.exposed
    assert not read_settings({"host": host, "tls_cert": "c", "tls_key": "k"}, {}).server.exposed


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_plain_text_on_loopback_needs_nothing(host: str) -> None:
    assert not ServerConfig(host=host).exposed


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"tls_cert": "c"}, "tls_cert"),
        ({"tls_key": "k"}, "tls_key"),
        ({"tls_client_ca": "a"}, "tls_client_ca"),
        ({"admin_client_names": ("x",)}, "admin_client_names"),
        ({"max_connection_age_grace": 1.0}, "max_connection_age_grace"),
        ({"port": -1}, "port"),
        ({"port": True}, "port"),
        ({"metrics_port": 65536}, "metrics_port"),
        ({"drain_seconds": -1.0}, "drain_seconds"),
        ({"drain_delay": float("inf")}, "drain_delay"),
        ({"stall_seconds": float("nan")}, "stall_seconds"),
        ({"keepalive_time": 0}, "keepalive_time"),
        ({"max_message_bytes": 2**31}, "max_message_bytes"),
        ({"max_metadata_bytes": 1}, "max_metadata_bytes"),
        ({"uvloop": "yes"}, "uvloop"),
        ({"log_level": "loud"}, "log_level"),
        ({"log_format": "xml"}, "log_format"),
        ({"host": ""}, "host"),
        ({"token_file": ""}, "token_file"),
        ({"debug_errors": 1}, "debug_errors"),
    ],
)
def test_the_config_refuses_by_field(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**given)  # type: ignore[arg-type]
    assert [violation.field for violation in caught.value.violations] == [field]
    assert repr(given[field]) in str(caught.value)


def test_overrides_of_a_config() -> None:
    assert ServerConfig.of(ServerConfig(port=1), host="::1") == ServerConfig(port=1, host="::1")
    with pytest.raises(ConfigError, match="prot: unknown option"):
        ServerConfig.of(prot=1)


def test_a_router_is_made_where_its_options_are_given(config_file: Path) -> None:
    config_file.write_text("[router]\nhang_seconds = 4\n[engine]\nthreads = 2\n")
    settings = read_settings({"replicas": "2"}, {"AENGINE_ROUTING_POLICY": "hash"}, str(config_file))
    assert settings.router == RouterConfig(replicas=2, routing_policy="hash", hang_seconds=4.0)
    assert settings.engine == EngineConfig(model="demo", threads=2)
    assert read_settings({"backends": "a:1, b:2"}, {}).router == RouterConfig(backends=("a:1", "b:2"))
    assert "AENGINE_HANG_SECONDS: " in refused({"backends": "a:1"}, {"AENGINE_HANG_SECONDS": "-1"})
    assert refused({"hang_seconds": "4"}) == "--hang-seconds: is for a router, which needs replicas, backends or ray"
    assert refused({"backends": "a:1"}, {"AENGINE_THREADS": "2"}).startswith("AENGINE_THREADS: is nothing for a server without a model")
    assert refused({"min_replicas": "2"}) == "--min-replicas: needs ray as well"
    settings = read_settings({"ray": True, "min_replicas": "2"}, {})
    assert (settings.router, settings.ray) == (RouterConfig(ray=True), RayConfig(min_replicas=2))
    assert "[server], [engine], [router], [ray]" in refused(file=str(_written(config_file, "[other]\n")))


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
